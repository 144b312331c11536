"""The cost of an arriving prompt on a GPU: the worker's time of steps with prompts, in the runner.

    python -m bench.arrivals --shape qwen3-0.6b --json arrivals.jsonl

Random weights of a real shape, no wire. `step` is the worker's time as its debug service lists it,
from taking the step to its tokens, with nothing else under way; `device` is what of it the device
computed; `host` is what a launch takes of the compute thread. A prompt alone is what an idle server
computes for its first token. A mixed step has rows that decode at the given context as well, and is
as long as the pause in all their streams. With `--asking`, decode steps some rows of which ask for
logprobs, a penalty, a grammar, or all three, and the same steps without, two in flight as they are
when served; `mask` is what filling the newest step's masks took on the host. The grammar is one
that allows almost every token, or a JSON schema where a line says so.
"""

import argparse
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.grammars import PERSON
from bench.harness import checkpoints, vocabulary
from bench.harness.records import Results, add_json, new_parser, spread
from bench.harness.tables import Room, entering, pages_for
from gateway.structure.structure import JsonSchema
from worker_svc.config import GEMM_ALGORITHMS, MODEL_IMPLS, QUANTIZATIONS, WorkerConfig
from worker_svc.protocol.step import NewSequence, RowSampling, StepInput, StepOutput
from worker_svc.runner.model_runner import ModelRunner, Pending
from worker_svc.startup import startup

PROMPTS = (2, 16, 64, 512, 1024, 2048)
MIXED = ("32+16", "32+64", "32+512", "32+1024", "128+512")
NUM_ASKED = 64
PLAIN = RowSampling()
LOGPROBS = RowSampling(num_top_logprobs=5)
PENALTY = RowSampling(presence_penalty=0.5, frequency_penalty=0.5)
GRAMMAR = RowSampling(grammar=vocabulary.LONG_TEXT)
PEOPLE = {"type": "array", "items": PERSON, "minItems": 50}  # longer than a measurement
SCHEMA = RowSampling(grammar=JsonSchema("", PEOPLE).to_grammar())
ALL = replace(PENALTY, num_top_logprobs=5, grammar=vocabulary.LONG_TEXT)
WARM_STEPS = 3
FIELDS = ("step_us", "device_us", "host_us", "mask_us")


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step, in microseconds."""

    step_us: float
    device_us: float
    host_us: float
    mask_us: float = 0.0  # filling the masks of grammars, without the wait for the tokens before


class Steps:
    """Steps of a runner one after the other, each waited for."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._step_id = 0

    def run(self, **fields: object) -> StepSample:
        """Raises RuntimeError if the step failed."""
        started = time.perf_counter()
        launched, host_us = self._launch(fields)
        device_us = _wait(launched)
        return StepSample((time.perf_counter() - started) * 1e6, device_us, host_us)

    def pipelined(self, times: int, **fields: object) -> list[StepSample]:
        """Steps each launched before the last is waited for; their time is the mean."""
        pending = deque([self._launch(fields)])
        parts, started = [], time.perf_counter()
        for _ in range(times):
            pending.append(self._launch(fields))
            launched, host_us = pending.popleft()
            device_us = _wait(launched)
            parts.append((device_us, host_us, self._runner.state.grammars.last_fill_s * 1e6))
        step_us = (time.perf_counter() - started) / times * 1e6
        _wait(pending.popleft()[0])
        return [StepSample(step_us, *part) for part in parts]

    def _launch(self, fields: Mapping[str, Any]) -> tuple[StepOutput | Pending, float]:
        self._step_id += 1
        step = StepInput(step_id=self._step_id, reset=self._step_id == 1, **fields)
        started = time.perf_counter()
        launched = self._runner.launch(step)
        return launched, (time.perf_counter() - started) * 1e6


def _wait(launched: StepOutput | Pending) -> float:
    """Microseconds of a step that the device computed. Raises RuntimeError if it failed."""
    output = launched if isinstance(launched, StepOutput) else launched.result()
    if output.error:
        raise RuntimeError(output.error)
    return output.timings.forward_us + output.timings.sample_us


@dataclass(frozen=True, slots=True)
class MixedStep:
    """Decoding rows and an arriving prompt."""

    num_rows: int
    num_prompt: int

    @classmethod
    def parse(cls, text: str) -> "MixedStep":
        rows, prompt = text.split("+")
        return cls(int(rows), int(prompt))

    def __str__(self) -> str:
        return f"{self.num_rows}+{self.num_prompt}"


def arrivals(runner: ModelRunner, shape: MixedStep, context: int, times: int) -> list[StepSample]:
    """A prompt of new tokens each time, in a slot of its own, into the rows that decode."""
    steps = Steps(runner)
    longest = max(context + WARM_STEPS + times + 1, shape.num_prompt)
    room = Room(runner.limits.groups, longest)
    rows = np.arange(shape.num_rows)
    if shape.num_rows:
        new = tuple(_sequence(slot, context, context - 1, room, PLAIN) for slot in rows.tolist())
        steps.run(new_sequences=new, slots=rows, num_scheduled=np.ones_like(rows))
    found = []
    for index in range(WARM_STEPS + times):
        arriving, before = (shape.num_rows + (index + turn) % 2 for turn in (0, 1))
        found.append(
            steps.run(
                freed_slots=np.array([before] if index else [], dtype=np.int64),
                new_sequences=(_sequence(arriving, shape.num_prompt, 0, room, PLAIN),),
                slots=np.append(rows, arriving),
                num_scheduled=np.append(np.ones_like(rows), shape.num_prompt),
            )
        )
    return found[WARM_STEPS:]


def asking(
    runner: ModelRunner, kinds: Sequence[RowSampling], context: int, times: int
) -> list[StepSample]:
    """Decode steps of as many rows as there are kinds, two in flight as they are when served."""
    steps = Steps(runner)
    room = Room(runner.limits.groups, context + WARM_STEPS + times + 1)
    rows = np.arange(len(kinds))
    ones = np.ones_like(rows)
    new = tuple(
        _sequence(slot, context, context - 1, room, kind) for slot, kind in enumerate(kinds)
    )
    steps.run(new_sequences=new, slots=rows, num_scheduled=ones)
    for _ in range(WARM_STEPS):
        steps.run(slots=rows, num_scheduled=ones)
    found = steps.pipelined(times, slots=rows, num_scheduled=ones)
    if any(kind.grammar for kind in kinds):
        return found
    return [replace(one, mask_us=0.0) for one in found]  # the masks were those of steps before


def _sequence(
    slot: int, num_tokens: int, num_computed: int, room: Room, sampling: RowSampling
) -> NewSequence:
    token_ids = (np.arange(num_tokens, dtype=np.int32) * 7 + slot) % 1000 + 1
    return entering(slot, token_ids, num_computed, room, sampling)


def main(arguments: Sequence[str]) -> int:
    """Measures prompts alone, then mixed steps, then rows that ask."""
    options = parse(arguments)
    told = Results(options.json, ["python", "-m", "bench.arrivals", *arguments])
    shapes = [MixedStep(0, n) for n in options.prompts] + [
        MixedStep.parse(text) for text in options.mixed
    ]
    longest = max([options.context + 100, *(shape.num_prompt for shape in shapes)])
    most_rows = max([NUM_ASKED, *(2 + shape.num_rows for shape in shapes)])
    config = WorkerConfig(
        gemm_algorithms=options.gemm_algorithms,
        max_num_seqs=max(256, most_rows),
        max_model_len=longest + 32,
        load_format="auto" if options.model else "dummy",
        model_impl=options.model_impl,
        quantization=options.quantization,
    )
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as made:
        folder = checkpoints.describe(Path(made), options.shape, options.layers)
        if options.asking and not options.model:
            vocabulary.write_spelling(folder, checkpoints.vocab_size_of(options.shape))
        model = startup.load(config, options.model or folder, "auto", "")
        runner = startup.build_runner(config, model, pages_for(model, config, most_rows))
        started = time.perf_counter()
        runner.warm_up()
        warm_s = time.perf_counter() - started
        graph_gib = getattr(runner, "graph_bytes", 0) / (1 << 30)
        told.say(f"warm after {warm_s:.1f} s; graphs take {graph_gib:.2f} GiB")
    told.say(f"{'step':>24} {'step us':>9} {'device us':>10} {'host us':>8} {'mask us':>8}")
    given = {"shape": options.shape, "layers": options.layers, "context": options.context}
    told.add(
        "arrivals_start", given | {"warm_s": round(warm_s, 2), "graph_gib": round(graph_gib, 2)}
    )
    for shape in shapes:
        runs = [
            arrivals(runner, shape, options.context, options.steps) for _ in range(options.repeat)
        ]
        _tell(told, given | {"rows": shape.num_rows, "prompt": shape.num_prompt}, str(shape), runs)
    for name, kinds in asked() if options.asking else ():
        runs = [
            asking(runner, kinds, options.context, options.steps) for _ in range(options.repeat)
        ]
        _tell(told, given | {"rows": len(kinds), "asking": name}, name, runs)
    return 0


def asked() -> list[tuple[str, list[RowSampling]]]:
    """Batches of 64: plain, then with one row of each kind, then with all rows asking."""
    plain = [PLAIN] * NUM_ASKED
    return [
        ("plain", plain),
        ("one logprobs", [LOGPROBS, *plain[1:]]),
        ("one penalty", [PENALTY, *plain[1:]]),
        ("one grammar", [GRAMMAR, *plain[1:]]),
        ("one of each", [LOGPROBS, PENALTY, GRAMMAR, *plain[3:]]),
        ("one JSON schema", [SCHEMA, *plain[1:]]),
        ("one of each, JSON schema", [LOGPROBS, PENALTY, SCHEMA, *plain[3:]]),
        ("all logprobs", [LOGPROBS] * NUM_ASKED),
        ("all penalty", [PENALTY] * NUM_ASKED),
        ("all grammar", [GRAMMAR] * NUM_ASKED),
        ("all JSON schema", [SCHEMA] * NUM_ASKED),
        ("all three", [ALL] * NUM_ASKED),
        ("all three, JSON schema", [replace(ALL, grammar=SCHEMA.grammar)] * NUM_ASKED),
    ]


def _tell(
    told: Results, given: dict[str, object], name: str, runs: Sequence[Sequence[StepSample]]
) -> None:
    """The median of each repetition, and their median."""
    values = {
        field: spread([float(np.median([asdict(one)[field] for one in run])) for run in runs], 1)
        for field in FIELDS
    }
    step, device, host, mask = (values[field]["median"] for field in FIELDS)
    told.say(f"{name:>24} {step:9.0f} {device:10.0f} {host:8.0f} {mask:8.0f}")
    told.add("arrivals", given | values)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("bench.arrivals", __doc__)
    add = parser.add_argument
    add("--shape", choices=checkpoints.NAMES, default="qwen3-0.6b")
    add("--model", type=Path, help="a folder with the shape's checkpoint")
    add("--prompts", type=int, nargs="*", default=list(PROMPTS), help="tokens of prompts alone")
    add("--mixed", nargs="*", default=list(MIXED), metavar="ROWS+PROMPT", help="mixed steps")
    add("--context", type=int, default=576, help="tokens of the rows that decode")
    add("--steps", type=int, default=15, help="of each repetition, whose median counts")
    add("--repeat", type=int, default=3)
    add("--layers", type=int, default=0, help="cut the shape to so many")
    add("--gemm-algorithms", choices=GEMM_ALGORITHMS, default="auto")
    add("--model-impl", choices=MODEL_IMPLS, default="auto")
    add("--quantization", choices=QUANTIZATIONS, default="auto")
    add("--asking", action="store_true", help="also decode steps whose rows ask for more")
    add_json(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
