"""Arrivals through the three services on one GPU: what each client sees, and who uses which core.

    python -m bench.serving --shape qwen3-0.6b --json serving.jsonl

Random weights of a real shape; prompts of random ids without common prefixes, 512 tokens in and 128
out, each of which has text. One request at a time on an idle server, Poisson arrivals at each of
the given rates, and a burst of all at once. Clients are processes of their own. `cores` are the CPU
seconds of each service, its helpers included, per second of the load; 1.0 is one core kept busy.
With the API `scheduler`, token ids go straight to the scheduler, which also shows where the time to
an idle server's first token goes.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from bench.harness import checkpoints, vocabulary
from bench.harness.deployment import cpu_s_of
from bench.harness.records import Results, add_json, new_parser
from bench.harness.services import free_ports, launched, settings
from bench.serving.clients import APIS, OfferedLoad, Target, run
from bench.serving.waterfall import prompt_steps, table
from pagewire.cli.benchmark.load import Summary, summarize
from pagewire.cli.launcher.services import LOOPBACK, plan
from pagewire.v1 import inference_pb2, inference_pb2_grpc

ANSWER_TIMEOUT_S = 5.0
IDLE = "idle"


@dataclass(frozen=True, slots=True)
class RunningProduct:
    """A running product: an address for each API, and the process of each service."""

    addresses: dict[str, str]
    pids: dict[str, int]


def loads(options: argparse.Namespace) -> list[OfferedLoad]:
    """The loads in the order in which they are sent."""
    sizes = {"input_len": options.input_len, "output_len": options.output_len}
    return [
        OfferedLoad(IDLE, options.idle, options.input_len, 8, concurrency=1),
        *(
            OfferedLoad(
                f"{rate:g}/s",
                max(1, round(rate * options.seconds)),
                rate_per_s=rate,
                num_clients=min(options.clients, 4),
                **sizes,
            )
            for rate in options.rates
        ),
        OfferedLoad("burst", options.burst, num_clients=options.clients, **sizes),
    ]


@contextlib.contextmanager
def serving(model: Path, options: argparse.Namespace) -> Iterator[RunningProduct]:
    """The three services, ready; ended after the block."""
    ports = free_ports()
    chosen = settings(ports, options.worker, gateway_options=options.gateway)
    specs = plan(chosen, model)
    addresses = {
        "http": f"{LOOPBACK}:{ports.gateway_http}",
        "grpc": f"{LOOPBACK}:{ports.gateway_grpc}",
        "scheduler": f"{LOOPBACK}:{ports.scheduler}",
        "worker": f"{LOOPBACK}:{ports.worker}",
    }
    with grpc.insecure_channel(addresses["grpc"]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        def is_served() -> bool:
            with contextlib.suppress(grpc.RpcError):
                request = inference_pb2.ListModelsRequest()
                return bool(stub.ListModels(request, timeout=ANSWER_TIMEOUT_S).models)
            return False

        with launched(specs, is_served) as services:
            pids = {spec.name: services[spec.name].guard_pid for spec in specs}
            yield RunningProduct(addresses, pids)


def measure(
    served: RunningProduct, api: str, load: OfferedLoad
) -> tuple[Summary, dict[str, float]]:
    """The view of one load's clients, and the cores that each service used."""
    before = cpu_s_of(served.pids)
    samples = run(Target(api, served.addresses[api]), load)
    after = cpu_s_of(served.pids)
    summary = summarize(samples)
    whole_s = max(summary.elapsed_s, 1e-9)
    if summary.num_failed:
        raise RuntimeError(f"{summary.num_failed} requests failed; the first: {summary.failure}")
    return summary, {name: round((after[name] - before[name]) / whole_s, 2) for name in before}


TITLE = (
    f"{'api':<10}{'load':<8}{'TTFT p50':>10}{'p99':>9}{'TPOT p50':>10}{'p99':>9}"
    f"{'ITL p99':>9}{'tokens/s':>10}  cores"
)


def line(api: str, load: OfferedLoad, summary: Summary, cores: dict[str, float]) -> str:
    """One row of the table; times in milliseconds."""
    used = " ".join(f"{name} {value:.2f}" for name, value in cores.items())
    return (
        f"{api:<10}{load.name:<8}{summary.ttft_ms.p50:>10.2f}{summary.ttft_ms.p99:>9.2f}"
        f"{summary.tpot_ms.p50:>10.3f}{summary.tpot_ms.p99:>9.3f}{summary.itl_ms.p99:>9.2f}"
        f"{summary.output_tokens_per_s:>10.0f}  {used}"
    )


@contextlib.contextmanager
def _model(options: argparse.Namespace) -> Iterator[Path]:
    """A folder with the shape's checkpoint and a tokenizer."""
    if options.model is not None:
        yield options.model
        return
    with checkpoints.temporary(options.shape) as made:
        vocabulary.write(made, checkpoints.SHAPES[options.shape].vocab_size)
        yield made


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    results = Results(options.json, ["python", "-m", "bench.serving", *arguments])
    with _model(options) as model, serving(model, options) as served:
        results.say(TITLE)
        for _ in range(options.repeat):
            _round(served, options, results)
    return 0


def _round(served: RunningProduct, options: argparse.Namespace, results: Results) -> None:
    ttft_ms: dict[str, float] = {}
    for load in loads(options):
        for api in options.apis:
            summary, cores = measure(served, api, load)
            results.say(line(api, load, summary, cores))
            told = {"api": api, "load": asdict(load), "cores": cores}
            results.add("serving", {**told, "result": asdict(summary)})
            if load.name == IDLE:
                ttft_ms[api] = summary.ttft_ms.p50
        if load.name == IDLE and "scheduler" in ttft_ms:
            steps = prompt_steps(served.addresses["scheduler"], served.addresses["worker"])
            results.say("\n".join(table(steps, ttft_ms)))
            results.add("first_token", {**asdict(steps), "ttft_ms": ttft_ms})


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("bench.serving", __doc__)
    add = parser.add_argument
    add("--shape", choices=checkpoints.SHAPES, default="qwen3-0.6b")
    add("--model", type=Path, help="a model folder to serve instead")
    add("--apis", nargs="+", choices=APIS, default=list(APIS))
    add("--rates", type=float, nargs="*", default=[16.0, 64.0], help="requests per second")
    add("--seconds", type=float, default=8.0, help="of arrivals at each rate")
    add("--burst", type=int, default=512, help="requests at once")
    add("--idle", type=int, default=40, help="requests one at a time")
    add("--input-len", type=int, default=512)
    add("--output-len", type=int, default=128)
    add("--clients", type=int, default=min(4, os.cpu_count() or 1), help="client processes")
    add("--repeat", type=int, default=1)
    add_json(parser)
    add("--gateway", type=str.split, default=[], help="options of the gateway, in one word")
    add("--worker", nargs=argparse.REMAINDER, default=[], help="worker options")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
