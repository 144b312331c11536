"""The step-time model of a simulation: given as three numbers, or fitted from measured steps.

0.005,2e-5,1e-8        seconds: a base, per computed token, per token of context
FILE                   JSON: an object with these three by name; an object a line (or a list of
                       them) for each measured step; or what `bench.gpu_steps --json` writes
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scheduler_svc.core.step_time import StepTime, StepTimeFit

_PARTS = ("base_s", "per_token_s", "per_context_token_s")


class BadStepTime(ValueError):
    """A step-time model that cannot be read; the message names the field or the line."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step as somebody saw it."""

    num_tokens: int  # computed
    num_context_tokens: int  # with KV before the step, of all its rows
    duration_s: float


def parse_step_time(text: str) -> StepTime:
    """Three numbers or a file. Raises BadStepTime."""
    if "," in text or _is_number(text):
        parts = text.split(",")
        if len(parts) != len(_PARTS):
            raise BadStepTime(f"{text!r} has {len(parts)} numbers, not {','.join(_PARTS)}")
        return _checked(dict(zip(_PARTS, parts, strict=True)))
    path = Path(text)
    if not path.is_file():
        raise BadStepTime(f"{text!r} is neither {','.join(_PARTS)} nor a file")
    return _from_json(path)


def fit(steps: Iterable[MeasuredStep]) -> StepTime:
    """The model that fits measured steps best. Raises BadStepTime when there are too few."""
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
    if isinstance(data, dict) and "results" in data:
        return fit(_from_gpu_steps(data))
    if isinstance(data, dict):
        return _checked(data)
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


def _from_gpu_steps(report: Mapping[str, object]) -> Iterator[MeasuredStep]:
    """Decode steps alone, at one mean context length for all batch sizes."""
    try:
        context = report["options"]["context"]  # type: ignore[index]
        for result in report["results"]:  # type: ignore[attr-defined]
            batch = result["batch"]
            yield MeasuredStep(batch, batch * context, result["step_us"] / 1e6)
    except (KeyError, TypeError) as error:
        raise BadStepTime(f"a report of bench.gpu_steps lacks {error}") from error


def _measured(entry: object, where: str) -> MeasuredStep:
    names = tuple(MeasuredStep.__slots__)
    if not isinstance(entry, dict) or set(entry) != set(names):
        raise BadStepTime(f"{where}: expected an object with {', '.join(names)}")
    values = [_number(entry[name], f"{where}: {name}") for name in names]
    return MeasuredStep(int(values[0]), int(values[1]), values[2])


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
