"""Golden transcripts: each file in scenarios/ has stories, with all answers of the scheduler.

A story is a list of commands, a line `----`, and the full answer; a blank line ends it. Set
PAGEWIRE_REWRITE_SCENARIOS=1 to write the answers anew, and read the difference.

    config key=value ...                 a new scheduler (fields of SchedulerConfig)
    add ID prompt=1..8,5 key=value ...   a request (fields of Request)
    schedule                             plans a step
    priority ID NUMBER                   changes the priority of a live request
    reset-cache                          empties the prefix cache
    result TOKEN ... [bad=ROW]           answers the oldest step in flight, prompt outputs
           [bad-report]                  included
    grant STEPS                          plans up to so many decode steps at once
    cut | skip FIRST LAST                takes granted steps back: the request, the answer
    abort ID | worker-lost [blocks=N] | worker-back
    expire SECONDS                       advances the time
    state                                running and waiting requests, free blocks and slots
    blocks                               holders by block, and the free queue, next first
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.core import (
    BlockMoves,
    KvGroup,
    Policy,
    Preemption,
    ReceivedPromptOutput,
    Refused,
    Request,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
)
from scheduler_svc.core.invariants import check_invariants

SCENARIOS = sorted(Path(__file__).with_name("scenarios").glob("*.txt"))
REWRITE = os.environ.get("PAGEWIRE_REWRITE_SCENARIOS") == "1"
SEPARATOR = "----"

DEFAULTS: dict[str, object] = {
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
    "vocab_size": 1000,
    "eos_token_ids": (0,),
}


def parse_ids(text: str) -> tuple[int, ...]:
    """`1..4,9` is 1 2 3 4 9."""
    token_ids: list[int] = []
    for part in filter(None, text.split(",")):
        first, dots, last = part.partition("..")
        token_ids += range(int(first), int(last) + 1) if dots else [int(first)]
    return tuple(token_ids)


def parse_options(words: list[str]) -> dict[str, object]:
    """Parses key=value words; values are lists of ids, yes or no, or numbers."""
    options: dict[str, object] = {}
    for word in words:
        key, equals, text = word.partition("=")
        assert equals, f"{word!r} is not key=value"
        if key == "prompt" or key.endswith("_ids"):
            options[key] = parse_ids(text)
        else:
            options[key] = parse_value(key, text)
    return options


def parse_value(key: str, text: str) -> object:
    """Parses yes or no, a policy or a tenant by name, seconds, or a number."""
    if key == "policy":
        return Policy(text)
    if key == "preemption":
        return Preemption(text)
    if key in ("tenant", "cache_salt", "fork_group"):
        return text
    if text in ("yes", "no"):
        return text == "yes"
    return float(text) if key.endswith("_s") else int(text)


def tell_ids(ids: list[int]) -> str:
    """Ids with ranges: 1 2 3 9 becomes `1..3 9`."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def tell_short(blocks_short: Mapping[str, int]) -> str:
    """The blocks that each request lacks."""
    return "".join(f", {name} short by {number}" for name, number in blocks_short.items())


def tell_moves(moves: BlockMoves) -> Iterator[str]:
    """One line per kind of block copy."""
    for what, sources, targets in (
        ("swapped out: blocks {} to the host's {}", moves.swapped_out, moves.to_host),
        ("swapped in: the host's {} to blocks {}", moves.from_host, moves.swapped_in),
        ("copied: block {} to {}", moves.copied_from, moves.copied_to),
    ):
        if sources:
            yield "  " + what.format(tell_ids(sources), tell_ids(targets))


class Story:
    """Runs commands on one scheduler and prints its answers."""

    scheduler: Scheduler

    def __init__(self) -> None:
        self.names: list[str] = []  # by handle

    def run(self, line: str) -> Iterator[str]:
        command, *words = line.split()
        if command == "config":
            options = DEFAULTS | parse_options(words)
            options["num_blocks"] = int(str(options.pop("blocks", 16))) + 1  # the null block
            if "sliding_window" in options:  # of the only group
                size, window = options["block_size"], options.pop("sliding_window")
                options["kv_groups"] = (KvGroup(size, window),)  # type: ignore[arg-type]
            self.scheduler = Scheduler(SchedulerConfig(**options))  # type: ignore[arg-type]
            return
        action = getattr(self, "on_" + command.replace("-", "_"))
        yield from action(words)
        check_invariants(self.scheduler)

    def on_add(self, words: list[str]) -> Iterator[str]:
        options = parse_options(words[1:])
        prompt = np.array(options.pop("prompt"), dtype=np.int32)
        options["handle"] = len(self.names)
        self.names.append(words[0])
        try:
            self.scheduler.add(Request(words[0], prompt, **options))  # type: ignore[arg-type]
        except Refused as refused:
            yield f"refused, {refused.kind.value}: {refused}"

    def on_schedule(self, words: list[str]) -> Iterator[str]:
        assert not words
        plan = self.scheduler.schedule()
        if plan is None:
            yield "nothing to do"
            return
        noun = "token" if plan.num_tokens == 1 else "tokens"
        yield f"step {plan.step_id}{' (reset)' if plan.reset else ''}: {plan.num_tokens} {noun}"
        if plan.preempted:
            yield f"  preempted: {' '.join(plan.preempted)}"
        if plan.hold is not None:
            yield f"  the queue stops: {plan.hold.cause.value}{tell_short(plan.hold.blocks_short)}"
        if plan.freed_slots:
            yield f"  freed slots: {' '.join(map(str, plan.freed_slots))}"
        if plan.moves is not None:
            yield from tell_moves(plan.moves)
        yield from self.tell_rows(plan)

    def tell_rows(self, plan: StepPlan) -> Iterator[str]:
        """One line per row: its tokens, and changes of its sequence."""
        new = {entry.slot: entry for entry in plan.new_sequences}
        counts = plan.num_scheduled if plan.num_scheduled is not None else [1] * len(plan.slots)
        for sequence, slot, count, computed in zip(
            plan.sequences(), plan.slots.tolist(), counts, plan.num_computed.tolist(), strict=True
        ):
            what = "samples" if slot in plan.sampled_slots else "no token yet"
            what = "its end" if sequence in plan.prompt_ends else what
            line = f"  {sequence.request.request_id}: {computed}+{count}, {what}"
            if slot in new:
                line += f"; enters slot {slot}, blocks {tell_ids(new[slot].block_ids)}"
                line += f", {computed} cached" if computed else ""
            appended = zip(plan.appended_slots, plan.appended_block_ids, strict=True)
            gained = [block_id for owner, block_id in appended if owner == slot]
            line += f"; gains {tell_ids(gained)}" if gained else ""
            asked = [
                range(one.begin, one.end) for one in plan.due_prompt_outputs if one.slot == slot
            ]
            line += f"; outputs due {tell_ids(list(asked[0]))}" if asked else ""
            yield line

    def on_grant(self, words: list[str]) -> Iterator[str]:
        plans = self.scheduler.grant(int(words[0]))
        if not plans:
            yield "nothing to grant"
            return
        yield f"steps {plans[0].step_id}..{plans[-1].step_id} are granted"
        if plans[0].freed_slots:
            yield f"  freed slots: {' '.join(map(str, plans[0].freed_slots))}"
        yield from self.tell_rows(plans[0])

    def on_cut(self, words: list[str]) -> Iterator[str]:
        assert not words
        cut = self.scheduler.cut()
        asked = cut and f"steps {cut.first_step_id}..{cut.last_step_id} shall be left out"
        yield asked or "nothing to cut"

    def on_skip(self, words: list[str]) -> Iterator[str]:
        first, last = map(int, words)
        yield f"{self.scheduler.skip(first, last)} steps are taken back"

    def on_result(self, words: list[str]) -> Iterator[str]:
        plan = self.scheduler.oldest_in_flight
        assert plan is not None, "no step is in flight"
        bad = [int(word[4:]) for word in words if word.startswith("bad=")]
        token_ids = [int(word) for word in words if not word.startswith("bad")]
        reports = tuple(
            ReceivedPromptOutput(one.slot, one.begin, one.end, "bad-report" not in words)
            for one in plan.due_prompt_outputs
        )
        tokens = np.array(token_ids, dtype=np.int32)
        result = StepResult(plan.step_id, tokens, tuple(bad), reports)
        outputs = self.scheduler.update(result)
        yield f"step {plan.step_id} is done"
        for told in outputs.prompt_outputs:
            asked = plan.due_prompt_outputs[told.row]
            told_of = tell_ids(list(range(asked.begin, asked.end)))
            yield f"  {told.request.request_id} is told of {told_of}"
        for handle, token_id in zip(outputs.handles, outputs.token_ids, strict=True):
            yield f"  {self.names[int(handle)]} -> {token_id}"
        for finished in outputs.finished:
            yield (
                f"  {finished.request.request_id} ends: {finished.reason.value}, "
                f"{finished.num_output_tokens} out, {finished.num_cached_tokens} cached"
                + (
                    f", by stop token {stop}"
                    if (stop := finished.stop_token_id) is not None
                    else ""
                )
                + (f", {finished.message}" if finished.message else "")
            )

    def on_abort(self, words: list[str]) -> Iterator[str]:
        sequence = self.scheduler.abort(words[0])
        yield f"{words[0]} is gone" if sequence else f"{words[0]} is unknown"

    def on_priority(self, words: list[str]) -> Iterator[str]:
        sequence = self.scheduler.set_priority(words[0], int(words[1]))
        yield f"{words[0]} has priority {words[1]}" if sequence else f"{words[0]} is unknown"

    def on_reset_cache(self, words: list[str]) -> Iterator[str]:
        assert not words
        yield f"{self.scheduler.reset_prefix_cache()} blocks are forgotten"

    def on_expire(self, words: list[str]) -> Iterator[str]:
        for finished in self.scheduler.expire(float(words[0])):
            yield f"{finished.request.request_id} ends: {finished.reason.value}, {finished.message}"

    def on_worker_back(self, words: list[str]) -> Iterator[str]:
        assert not words
        self.scheduler.worker_back()
        yield "there is a worker"

    def on_worker_lost(self, words: list[str]) -> Iterator[str]:
        blocks = parse_options(words).get("blocks")
        num_ran = self.scheduler.worker_lost(None if blocks is None else int(str(blocks)) + 1)
        yield f"{num_ran} were running"
        if misfits := self.scheduler.misfits():
            yield f"too large now: {' '.join(misfits)}"

    def on_state(self, words: list[str]) -> Iterator[str]:
        assert not words
        state = self.scheduler.internal_state
        running = [
            f"{s.request.request_id}({state.table.num_tokens[s.slot]})"
            for s in state.running.sequences
        ]
        waiting = [f"{s.request.request_id}({len(s.token_ids)})" for s in state.waiting]
        yield (
            f"running [{' '.join(running)}] waiting [{' '.join(waiting)}] "
            f"free {state.pool.num_free} fenced {state.num_fenced_blocks} "
            f"in flight {self.scheduler.num_in_flight}"
        )

    def on_blocks(self, words: list[str]) -> Iterator[str]:
        assert not words
        state = self.scheduler.internal_state
        for sequence in state.running.sequences:
            assert sequence.slot is not None
            block_ids = state.table.blocks(sequence.slot)
            yield f"  {sequence.request.request_id}: {tell_ids(block_ids)}"
        yield f"  free: {tell_ids(list(state.pool.free_queue()))}"


def retell(text: str) -> str:
    """The same story with the answers of the current scheduler."""
    story, told, lines = Story(), [], iter(text.splitlines())
    answers: list[str] = []
    for line in lines:
        if line == SEPARATOR:
            told += [SEPARATOR, *answers]
            answers = []
            for old_answer in lines:  # up to the blank line
                if not old_answer:
                    told.append("")
                    break
            continue
        told.append(line)
        if line and not line.startswith("#"):
            answers += story.run(line)
    assert not answers, "the last commands have no ----"
    return "\n".join(told).rstrip() + "\n"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_story_is_told_as_written(path: Path) -> None:
    text = path.read_text()
    told = retell(text)
    if REWRITE:
        path.write_text(told)
    else:
        assert told == text


def test_there_are_stories() -> None:
    assert len(SCENARIOS) >= 40
