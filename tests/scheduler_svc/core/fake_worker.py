"""A worker without a model that tracks the content of its KV cache.

For every block and offset it keeps the tokens that the KV there was computed from, and refuses a
step whose rows would read anything else: wrong prefix reuse and premature block reuse both fail at
the step that reads the wrong content. The tokens it samples depend on request and position only.
"""

import zlib
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core import (
    BlockMoves,
    EnteringSequence,
    KvGroup,
    Preparation,
    Preparations,
    ReceivedPromptOutput,
    Request,
    StepPlan,
    StepResult,
)
from scheduler_svc.core.kv.state_snapshots import StateSave
from scheduler_svc.core.request.request import Extra, Extras, TokenIds
from scheduler_svc.core.step.plan import WorkerDraft

Content = int  # hash of a token and all tokens before it
_Memory = dict[tuple[int, int], Content]


def sampled_token(request_id: str, position: int, vocab_size: int) -> int:
    """The token sampled at a position of a request."""
    return zlib.crc32(f"{request_id}/{position}".encode()) % vocab_size


def picture_at(extras: Extras, position: int) -> Extra | None:
    """The picture that a position shows a part of."""
    return next((extra for extra in extras if extra.begin <= position < extra.end), None)


def content_of(before: Content, token_id: int, picture: Extra | None) -> Content:
    """The content of a position, given that of the one before it."""
    return hash((before, token_id) if picture is None else (before, token_id, picture))


def in_group(group: int, content: Content) -> Content:
    """The content of a position in a KV group: no two groups have the same."""
    return hash((group, content)) if group else content


@dataclass
class _Slot:
    request: Request
    token_ids: list[int]
    num_computed: int
    tables: list[list[int]]  # block ids by group
    root: Content  # parent of the first token
    contents: list[Content] = field(default_factory=list)  # per token
    prompt_output_begin: int = 0
    state: Content | None = None  # after the computed tokens; None: in the snapshot
    snapshot: int | None = None  # that it begins after
    saves: list[StateSave] = field(default_factory=list)  # that are still to be made

    def content(self, position: int) -> Content:
        """The content that the KV of a position must have been computed from."""
        while len(self.contents) <= position:
            before = self.contents[-1] if self.contents else self.root
            place = len(self.contents)
            picture = picture_at(self.request.extras, place)
            self.contents.append(content_of(before, self.token_ids[place], picture))
        return self.contents[position]


class FakeWorker:
    """Executes plans in order; asserts that a real worker could execute each."""

    def __init__(
        self, groups: tuple[KvGroup, ...], vocab_size: int, has_states: bool = False
    ) -> None:
        self.groups = groups
        self.has_states = has_states
        self.keeps_pictures_whole = False
        self.snapshots: dict[int, Content] = {}
        self.vocab_size = vocab_size
        self.kv: dict[tuple[int, int], Content] = {}  # (block, offset) to content
        self.host_kv: dict[tuple[int, int], Content] = {}  # (host block, offset) to content
        self.slots: dict[int, _Slot] = {}
        self.received_for: dict[
            int, list[Request]
        ] = {}  # step id to the requests with prompt outputs
        self.preparing: dict[int, Preparation] = {}  # asked for, not answered
        self.prepared: dict[int, Preparation] = {}
        self.last_step_id: int | None = None
        # Parent of first blocks by salt and adapter.
        self.roots: dict[tuple[str, str], Content] = {}
        self._previous_rows: list[int] = []
        self._num_resets = 0
        self._root_of: dict[str, Content] = {}  # request id to the root of its computed KV

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step."""
        if plan.reset:
            self.slots.clear()
            self.kv.clear()
            self.host_kv.clear()
            self.snapshots.clear()
        else:
            assert plan.step_id == (self.last_step_id or 0) + 1
        self.last_step_id = plan.step_id
        self._apply_changes(plan)
        rows, counts = self._rows(plan)
        for slot, drafted in plan.drafts.items():
            self._take_drafts(slot, self._made(slot, drafted))
        self._write(rows, counts)
        sampled, token_ids, num_sampled, prompt_outputs = [], [], [], []
        for row, count in zip(rows, counts, strict=True):
            self._read(row, count)
            if self.keeps_pictures_whole:
                self._check_pictures(row, count)
            prompt_outputs += self._compute_prompt_outputs(row, count)
            if self.has_states:
                self._follow_state(row, count)
            found = self._advance(row, count, len(plan.drafts.get(row, ())))
            if self.has_states and row in plan.drafts:
                slot = self.slots[row]
                slot.state = slot.content(slot.num_computed - 1)
            if found:
                sampled.append(row)
                token_ids += found
                num_sampled.append(len(found))
        assert plan.sampled_slots.tolist() == sampled
        tokens = np.array(token_ids, dtype=np.int32)
        self.received_for[plan.step_id] = [
            self.slots[prompt_output.slot].request for prompt_output in prompt_outputs
        ]
        ranges = np.array(num_sampled, dtype=np.int32) if plan.drafts else None
        return StepResult(
            plan.step_id, tokens, prompt_outputs=tuple(prompt_outputs), num_sampled=ranges
        )

    def _check_pictures(self, row: int, count: int) -> None:
        """Asserts that a row's tokens end within no picture."""
        slot = self.slots[row]
        end = slot.num_computed + count
        assert not any(extra.begin < end < extra.end for extra in slot.request.extras)

    def _apply_changes(self, plan: StepPlan) -> None:
        for number in plan.freed_slots:
            del self.slots[number]
        # A later sequence may share at once blocks that are swapped in for an earlier one.
        swapped_in = set(plan.moves.swapped_in) if plan.moves is not None else set()
        for new in plan.new_sequences:
            tables = [list(new.block_ids), *map(list, new.group_block_ids)]
            assert len(tables) == len(self.groups)
            held = {block_id for table in tables for block_id in table}
            is_swapped_in = not swapped_in.isdisjoint(held)
            swapped_in -= held
            assert new.slot not in self.slots, f"slot {new.slot} given away twice"
            self._use_preparations(new)
            self.slots[new.slot] = _Slot(
                new.request,
                new.token_ids.tolist(),
                new.num_computed_tokens,
                tables,
                self._root(new.request, is_swapped_in),
                prompt_output_begin=new.prompt_output_begin,
                snapshot=new.state_snapshot,
            )
        for save in plan.state_saves:
            slot = self.slots[save.slot]
            assert slot.num_computed < save.position
            assert all(earlier.position < save.position for earlier in slot.saves)
            slot.saves.append(save)
        for number, block_id in zip(plan.appended_slots, plan.appended_block_ids, strict=True):
            self.slots[number].tables[0].append(block_id)
        for group in plan.appended_to_groups:
            assert 0 < group.group < len(self.groups)
            for number, block_id in zip(group.slots, group.block_ids, strict=True):
                self.slots[number].tables[group.group].append(block_id)
        if plan.moves is not None:
            self._move(plan.moves)

    def prepare(self, preparations: Preparations) -> None:
        """Takes what is asked for; `finish_grammar` answers."""
        for preparation_id in preparations.dropped_ids:
            known = self.preparing.pop(preparation_id, None)
            assert known or self.prepared.pop(preparation_id), "dropped, and never asked for"
        for wanted in preparations.wanted:
            assert wanted.preparation_id not in {*self.preparing, *self.prepared}
            self.preparing[wanted.preparation_id] = wanted

    def finish_preparation(self, preparation_id: int) -> None:
        """Keeps a prepared requirement for its sequence."""
        self.prepared[preparation_id] = self.preparing.pop(preparation_id)

    def _use_preparations(self, new: EnteringSequence) -> None:
        for requirement, preparation_id in new.preparations.items():
            prepared = self.prepared.pop(preparation_id)
            assert prepared.requirement == requirement, "another requirement"
            assert prepared.request.request_id == new.request.request_id, "another one's"
            known = prepared.output_token_ids.tolist()
            output = new.token_ids[len(new.request.prompt_token_ids) :].tolist()
            assert output[: len(known)] == known, "prepared for another output"

    def _root(self, request: Request, is_swapped_in: bool) -> Content:
        """The parent of a request's first block. Two sequences may share KV if theirs are the same.

        KV that is swapped in was computed when the sequence last entered.
        """
        if request.skip_prefix_cache:
            root = hash((request.tenant, request.fork_group or request.request_id))
        elif is_swapped_in:
            root = self._root_of[request.request_id]
        else:
            key = request.cache_salt, request.adapter_id
            fresh = hash((key, len(self.roots), self._num_resets))
            root = self.roots.setdefault(key, fresh)
        self._root_of[request.request_id] = root
        return root

    def _move(self, moves: BlockMoves) -> None:
        for source, target in zip(moves.swapped_out, moves.to_host, strict=True):
            self._copy(self.kv, source, self.host_kv, target)
        for source, target in zip(moves.from_host, moves.swapped_in, strict=True):
            assert (source, 0) in self.host_kv, f"nothing was put into host block {source}"
            self._copy(self.host_kv, source, self.kv, target)
        for source, target in zip(moves.copied_from, moves.copied_to, strict=True):
            self._copy(self.kv, source, self.kv, target)
        for targets in (moves.to_host, moves.swapped_in, moves.copied_to):
            assert len(set(targets)) == len(targets), "two contents for one block"

    def _copy(self, source: _Memory, block: int, target: _Memory, to_block: int) -> None:
        for offset in range(max(group.block_size for group in self.groups)):
            content = source.get((block, offset))
            if content is None:
                target.pop((to_block, offset), None)
            else:
                target[to_block, offset] = content

    def forget_prefixes(self) -> None:
        """Marks all KV as stale: sequences that enter from now on must not read it."""
        self._num_resets += 1
        self.roots = {}

    def _rows(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        rows = plan.slots.tolist()
        assert len(set(rows)) == len(rows), "a row occurs twice"
        if plan.same_rows:
            assert rows == self._previous_rows
            assert plan.num_scheduled is None
        self._previous_rows = rows
        counts = [1] * len(rows) if plan.num_scheduled is None else plan.num_scheduled.tolist()
        for row, computed in zip(rows, plan.num_computed.tolist(), strict=True):
            assert self.slots[row].num_computed == computed
        return rows, counts

    def _write(self, rows: list[int], counts: list[int]) -> None:
        """Stores the KV of the whole step, as every layer does before attention."""
        written = set()
        for row, count in zip(rows, counts, strict=True):
            slot = self.slots[row]
            assert count > 0
            for position in range(slot.num_computed, slot.num_computed + count):
                for group in range(len(self.groups)):
                    cell = self._cell(slot, group, position)
                    assert cell not in written, f"two rows of a step write to {cell}"
                    written.add(cell)
                    self.kv[cell] = in_group(group, slot.content(position))

    def _read(self, row: int, count: int) -> None:
        slot, name = self.slots[row], self.slots[row].request.request_id
        for index, group in enumerate(self.groups):
            first = 0 if group.window is None else max(0, slot.num_computed - group.window + 1)
            for position in range(first, slot.num_computed + count):
                found = self.kv.get(self._cell(slot, index, position))
                expected = in_group(index, slot.content(position))
                assert found == expected, f"{name} reads a stranger's KV at {position}"

    def _follow_state(self, row: int, count: int) -> None:
        """Moves a row's state over the tokens that it computes, and makes snapshots on the way."""
        slot, name = self.slots[row], self.slots[row].request.request_id
        begin, end = slot.num_computed, slot.num_computed + count
        if slot.snapshot is not None:
            slot.state, slot.snapshot = self.snapshots[slot.snapshot], None
        expected = slot.content(begin - 1) if begin else None
        assert slot.state == expected, f"{name} goes on from a stranger's state at {begin}"
        while slot.saves and slot.saves[0].position <= end:
            save = slot.saves.pop(0)
            self.snapshots[save.snapshot] = slot.content(save.position - 1)
        slot.state = slot.content(end - 1)

    def _cell(self, slot: _Slot, group: int, position: int) -> tuple[int, int]:
        size = self.groups[group].block_size
        block_id = slot.tables[group][position // size]
        assert block_id > 0, "the null block is in use"
        return block_id, position % size

    def _compute_prompt_outputs(self, row: int, count: int) -> list[ReceivedPromptOutput]:
        """The prompt outputs due from the positions that a row computes."""
        slot = self.slots[row]
        begin = max(slot.num_computed, slot.prompt_output_begin)
        end = min(slot.num_computed + count, slot.request.prompt_output_end)
        if end <= begin:
            return []
        return [ReceivedPromptOutput(row, begin, end)]

    def _made(self, row: int, drafted: TokenIds | WorkerDraft) -> list[int]:
        """A draft's tokens; those that this worker makes itself are right but for every third."""
        if not isinstance(drafted, WorkerDraft):
            token_ids: list[int] = drafted.tolist()
            return token_ids
        slot = self.slots[row]
        name, ends = slot.request.request_id, len(slot.token_ids) + np.arange(len(drafted))
        return [
            (sampled_token(name, end, self.vocab_size) + (end % 3 == 0)) % self.vocab_size
            for end in ends.tolist()
        ]

    def _take_drafts(self, row: int, drafted: list[int]) -> None:
        """Adds drafts to a row's tokens, as if they were known, until it has advanced."""
        slot = self.slots[row]
        assert drafted and slot.num_computed == len(slot.token_ids) - 1, "it does not decode"
        slot.content(len(slot.token_ids) - 1)
        slot.token_ids += drafted

    def _advance(self, row: int, count: int, num_drafted: int) -> list[int]:
        """The tokens that the row samples, if it has reached its last one."""
        slot = self.slots[row]
        assert slot.num_computed + count <= len(slot.token_ids), "a row computes an unknown token"
        if num_drafted:
            assert slot.num_computed + count == len(slot.token_ids), "a draft is not computed"
        position = len(slot.token_ids) - num_drafted
        slot.num_computed = min(slot.num_computed + count, position)
        if slot.num_computed < position or slot.request.max_tokens == 0:
            return []
        drafted, slot.token_ids[position:] = slot.token_ids[position:], []
        del slot.contents[position:]
        found: list[int] = []
        while True:
            name, at = slot.request.request_id, position + len(found)
            found.append(sampled_token(name, at, self.vocab_size))
            if drafted[len(found) - 1 :][:1] != found[-1:]:
                break
        slot.token_ids += found
        slot.num_computed += len(found) - 1
        return found
