"""The step-time model of a simulation: given as three numbers, or fitted from measured steps.

0.005,2e-5,1e-8        seconds: a base, per computed token, per token of context
FILE                   JSON: an object with these three by name; an object a line (or a list of
                       them) for each measured step; or the lines that
                       `pagewire bench steps --in-runner --json` writes
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scheduler_svc.core import StepPlan
from scheduler_svc.core.estimate.step_time import StepTime, StepTimeFit

_BENCHMARK = "benchmark"  # key of the benchmark's name in a line
_PARTS = ("base_s", "per_token_s", "per_context_token_s")


class BadStepTime(ValueError):
    """Raised when a step-time model cannot be read; the message names the field or the line."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One measured step."""

    num_tokens: int  # computed tokens
    num_context_tokens: int  # tokens with KV before the step, over all rows
    duration_s: float


def parse_step_time(text: str) -> StepTime:
    """Reads three numbers or a file. Raises BadStepTime."""
    if "," in text or _is_number(text):
        parts = text.split(",")
        if len(parts) != len(_PARTS):
            raise BadStepTime(f"{text!r} has {len(parts)} numbers, not {','.join(_PARTS)}")
        return _checked(dict(zip(_PARTS, parts, strict=True)))
    path = Path(text)
    if not path.is_file():
        raise BadStepTime(f"{text!r} is neither {','.join(_PARTS)} nor a file")
    return _from_json(path)


def num_context_tokens(plan: StepPlan) -> int:
    """Tokens with KV before a step, over all rows: what the step's attention reads.

    A row with drafts reads them for each of its tokens, as that many rows would.
    """
    total = int(plan.num_computed.sum())
    if plan.drafts:
        by_slot = dict(zip(plan.slots.tolist(), plan.num_computed.tolist(), strict=True))
        total += sum(len(draft) * by_slot[slot] for slot, draft in plan.drafts.items())
    return total


def fit(steps: Iterable[MeasuredStep]) -> StepTime:
    """The model that fits the measured steps best. Raises BadStepTime when there are too few."""
    fitting = StepTimeFit()
    for step in steps:
        fitting.observe(step.num_tokens, step.num_context_tokens, step.duration_s)
    found = fitting.solve()
    if found is None:
        raise BadStepTime(f"{fitting.num_observations} measured steps are too few to fit")
    return found


def _from_json(path: Path) -> StepTime:
    text = path.read_text(encoding="utf-8")
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        data = [_load_line(path, n, line) for n, line in _lines(text)]
    if isinstance(data, dict) and _BENCHMARK not in data:
        return _checked(data)
    if isinstance(data, dict):
        data = [data]
    if not isinstance(data, list):
        raise BadStepTime(f"{path} holds neither an object nor a list")
    return fit(_measured(entry, f"{path}, step {n}") for n, entry in enumerate(data, 1))


def _lines(text: str) -> Iterator[tuple[int, str]]:
    return ((n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip())


def _load_line(path: Path, number: int, line: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise BadStepTime(f"{path}, line {number}: {error}") from error


def _measured(entry: object, where: str) -> MeasuredStep:
    if isinstance(entry, dict) and _BENCHMARK in entry:
        return _from_benchmark(entry, where)
    names = tuple(MeasuredStep.__slots__)
    if not isinstance(entry, dict) or set(entry) != set(names):
        raise BadStepTime(f"{where}: expected an object with {', '.join(names)}")
    values = [_number(entry[name], f"{where}: {name}") for name in names]
    return MeasuredStep(int(values[0]), int(values[1]), values[2])


def _from_benchmark(line: Mapping[str, object], where: str) -> MeasuredStep:
    """A decode step of one batch size, all rows at about one context length."""
    if line[_BENCHMARK] != "runner_steps":
        raise BadStepTime(f"{where}: {line[_BENCHMARK]!r} is not runner_steps")
    try:
        batch, context = (_number(line[name], f"{where}: {name}") for name in ("batch", "context"))
        step_us = line["step_us"]["median"]  # type: ignore[index]
    except (KeyError, TypeError) as error:
        raise BadStepTime(f"{where} of a benchmark lacks {error}") from error
    duration_s = _number(step_us, f"{where}: step_us") / 1e6
    return MeasuredStep(int(batch), int(batch * context), duration_s)


def _checked(parts: Mapping[str, object]) -> StepTime:
    unknown, missing = set(parts) - set(_PARTS), set(_PARTS) - set(parts)
    if unknown or missing:
        raise BadStepTime(
            f"a step-time model has {', '.join(_PARTS)}; "
            + ", ".join(
                [*(f"no {name}" for name in missing), *(f"no use for {n}" for n in unknown)]
            )
        )
    return StepTime(*(_number(parts[name], name) for name in _PARTS))


def _number(value: object, name: str) -> float:
    try:
        number = float(str(value))
    except ValueError:
        raise BadStepTime(f"{name} is {value!r}, not a number") from None
    if not 0 <= number < math.inf:
        raise BadStepTime(f"{name} is {number:g}, must not be negative")
    return number


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
