"""Draws the results of `pagewire bench documented`, and prints its tables as Markdown.

    python -m bench.plot documented.jsonl --to docs/performance

Of several results for the same measurement the last counts. Results of other engines are in
`bench.compare.peers`.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.compare import peers
from bench.compare.peers import CEILING, FLOOR, NANO_VLLM, VLLM
from bench.harness.bars import Chart, svg
from bench.harness.records import new_parser

OURS = "pagewire"
TENSOR_PARALLEL = "--tensor-parallel-size"
SERIES = (OURS, VLLM, NANO_VLLM)
NAMES = {"qwen3-0.6b": "Qwen3-0.6B", "qwen3-8b": "Qwen3-8B"}

Line = Mapping[str, Any]


def read(text: str) -> list[Line]:
    """The results in a file, the last of each kind."""
    found: dict[tuple[object, ...], Line] = {}
    for line in map(json.loads, filter(None, text.splitlines())):
        kind = ("benchmark", "kernel", "shape", "batch", "max_grant", "seed", "num_prompts")
        found[num_gpus(line), *(line.get(name) for name in kind)] = line
    return list(found.values())


def num_gpus(line: Line) -> int:
    """The number of GPUs of one worker group, from the worker's options."""
    options = line.get("worker", [])
    if TENSOR_PARALLEL in options:
        return int(options[options.index(TENSOR_PARALLEL) + 1])
    return int(line.get("tensor_parallel_size", 1))


def model(line: Line) -> str:
    """The served model, as text."""
    count, shape = num_gpus(line), str(line["shape"])
    name = NAMES.get(shape, shape)
    return name if count == 1 else f"{name} on {count} GPUs"


def charts(lines: Sequence[Line]) -> Iterator[tuple[str, Chart]]:
    """(name, chart): the steps of each shape, and the tokens per second."""
    for (shape, count), others in peers.STEP_MS.items():
        of_shape = [
            line
            for line in lines
            if _is(line, "steps", shape, count) and line.get("max_grant") is None
        ]
        steps = {
            f"batch {line['batch']}": {
                OURS: line["step_ms"]["median"],
                **others.get(line["batch"], {}),
            }
            for line in sorted(of_shape, key=lambda line: line["batch"])
        }
        if steps:
            title = f"One decode step of {model(of_shape[0])}, ms"
            suffix = "" if count == 1 else f"-x{count}"
            yield f"steps-{shape}{suffix}.svg", Chart(title, steps, SERIES, FLOOR, ".2f")
    rates = {
        model(line): {OURS: line["tokens_per_s"]["median"], **others}
        for (shape, count), others in peers.TOKENS_PER_S.items()
        for line in lines
        if _is(line, "throughput", shape, count) and line["seed"] == 0
    }
    if rates:
        title = "256 requests, output tokens per second"
        yield "throughput.svg", Chart(title, rates, SERIES, CEILING, ",.0f")


def _is(line: Line, benchmark: str, shape: str, count: int) -> bool:
    return (line["benchmark"], line.get("shape"), num_gpus(line)) == (benchmark, shape, count)


Row = Callable[[Line], Sequence[object]]

TABLES: dict[str, tuple[Sequence[str], Row]] = {
    "steps": (
        ("through the split, batch", "step, ms", "each", "device, ms", "idle", "tokens/s"),
        lambda line: (
            f"{model(line)}, {line['batch']}{_grants(line)}",
            f"{line['step_ms']['median']:.3f}",
            _each(line["step_ms"], ".3f"),
            f"{line['device_ms']['median']:.3f}",
            f"{line['idle_share']['median']:.2%}",
            f"{1e3 * line['batch'] / line['step_ms']['median']:,.0f}",
        ),
    ),
    "throughput": (
        (
            *("requests", "tokens/s", "each", "idle"),
            "CPU s per 1,000 tokens: scheduler, worker, client",
        ),
        lambda line: (
            f"{model(line)}, {line['num_requests']}, seed {line['seed']}",
            f"{line['tokens_per_s']['median']:,}",
            _each(line["tokens_per_s"], ",d"),
            f"{line['idle_share']['median']:.2%}",
            ", ".join(f"{cpu['median']:.4f}" for cpu in line["cpu_s_per_1000_tokens"].values()),
        ),
    ),
    "prefill": (
        ("prefill", "prompt tokens/s", "each"),
        lambda line: (
            f"{model(line)}, {line['num_prompts']} x {line['prompt_len']}",
            f"{line['tokens_per_s']['median']:,}",
            _each(line["tokens_per_s"], ",d"),
        ),
    ),
    "runner_steps": (
        ("in the runner, batch", "step, ms", "device, ms", "bubble, us", "host, us", "tokens/s"),
        lambda line: (
            f"{model(line)}, {line['batch']}",
            f"{line['step_us']['median'] / 1e3:.3f}",
            f"{line['device_us']['median'] / 1e3:.3f}",
            f"{line['bubble_us']['median']:.0f}",
            f"{line['host_us']['median']:.0f}",
            f"{line['tokens_per_s']['median']:,.0f}",
        ),
    ),
    "kernels": (
        ("kernel", "us", "of the ceiling"),
        lambda line: (
            f"{line['kernel']}, {line['shape']}",
            f"{line['us']:.1f}",
            f"{line['share_of_ceiling']:.0%}",
        ),
    ),
    "startup": (
        ("process start to first token", "cold, s", "warm, s"),
        lambda line: (
            model(line),
            line["cold_s"],
            ", ".join(map(str, line["warm_s"])),
        ),
    ),
}


def _grants(line: Line) -> str:
    most = line.get("max_grant")
    return "" if most is None else f", grants of at most {most}"


def _each(spread: Mapping[str, Any], form: str) -> str:
    return ", ".join(format(value, form) for value in spread["each"])


def tables(lines: Sequence[Line]) -> Iterator[str]:
    """The results as Markdown."""
    for benchmark, (titles, row) in TABLES.items():
        chosen = [line for line in lines if line["benchmark"] == benchmark]
        if chosen:
            cells = [titles, ["---"] * len(titles), *map(row, chosen)]
            yield "".join(f"| {' | '.join(map(str, each))} |\n" for each in cells)


def main(arguments: Sequence[str]) -> int:
    """Writes the pictures and prints the tables."""
    parser = new_parser("bench.plot", __doc__)
    parser.add_argument("results", type=Path, help="the lines of --json")
    parser.add_argument("--to", type=Path, help="write pictures into this folder")
    options = parser.parse_args(arguments)
    lines = read(options.results.read_text(encoding="utf-8"))
    sys.stdout.write("\n".join(tables(lines)))
    if options.to is None:
        return 0
    drawn = dict(charts(lines))
    if not drawn:
        parser.error(f"{options.results}: no steps and no throughput to draw")
    options.to.mkdir(parents=True, exist_ok=True)
    for name, chart in drawn.items():
        (options.to / name).write_text(svg(chart), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
