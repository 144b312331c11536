"""Costs of the gateway: per token over SSE and gRPC, per open stream, and to the first byte.

    python -m bench.gateway [--json results.jsonl]
    python -m bench.gateway --processes 4 --clients 4 --rates 100000 --streams 1024
    python -m bench.gateway --model FOLDER    without the default model: another one's tokenizer

The gateway runs as it is started in production, between a scheduler that sends scripted tokens to
all streams at once, one per step, and clients that read them: each is a process, and the gateway's
alone is counted, all of them with --processes. "per CPU s" is what one core could stream; "per msg"
is above 1 where the gateway was busy and put several tokens into one message; the delay runs from
the scheduler's step to the client's read.
"""

import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from bench.harness import vocabulary
from bench.harness.records import new_parser
from bench.harness.services import ROOT, Ports, commit, free_ports, hardware
from default_model import folder

RATES = (5_000, 10_000, 20_000, 30_000, 0)  # 0: without limit
FIRST_BYTES = 50  # requests, one at a time
READY_TIMEOUT_S = 60.0
READY_CHECKS = 4  # per gateway process
CONNECTIONS = 16  # of each client over gRPC, to several gateways


@dataclass(frozen=True, slots=True)
class GatewayMeasurement:
    """One measurement."""

    api: str
    offered_per_s: float  # 0: without limit
    tokens_per_s: float
    tokens_per_cpu_s: float
    cpu_us_per_token: float
    cpu_share: float  # of one core
    tokens_per_message: float
    delay_p50_ms: float
    delay_p99_ms: float
    memory_per_stream_kib: float


class GatewayProcess:
    """The measured process, and its children if it is a supervisor, from the system's view."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._pid = process.pid
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")

    def cpu_s(self) -> float:
        """Processor seconds so far, all threads."""
        ticks = 0
        for pid in self._pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks * self._tick_s

    def memory_kib(self) -> int:
        """Resident memory."""
        return sum(map(self._resident_kib, self._pids()))

    def _resident_kib(self, pid: int) -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(next(x for x in status.splitlines() if x.startswith("VmRSS")).split()[1])

    def _pids(self) -> list[int]:
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text()
        return [self._pid, *map(int, children.split())]


@contextmanager
def process(*arguments: str, log: IO[bytes], **pipes: int) -> Iterator["subprocess.Popen[bytes]"]:
    """A child process that ends with this one."""
    child = subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=ROOT, stderr=log, **pipes  # type: ignore[call-overload]
    )  # fmt: skip
    try:
        yield child
    finally:
        child.terminate()
        child.wait(15)


def wait_until_ready(ports: Ports, log: Path) -> None:
    """Waits until the gateway has found its scheduler; RuntimeError says how its log ends."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{ports.gateway_http}/ready", timeout=2)
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                said = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the gateway is not ready: {error}\n{said}") from error
            time.sleep(0.1)


class GatewayBench:
    """Starts the processes of one measurement and reads their output."""

    def __init__(self, model: Path, log: IO[bytes], num_processes: int = 1) -> None:
        self._model = model
        self._log = log
        self._num_processes = num_processes

    @contextmanager
    def _serving(
        self, ports: Ports, streams: int, tokens: int, rate: float
    ) -> Iterator[tuple[GatewayProcess, "subprocess.Popen[bytes]"]]:
        size = ("--streams", str(streams), "--tokens", str(tokens), "--rate", str(rate))
        source = ("bench.gateway.peers", "source", "--model", str(self._model))
        processes = ("--processes", str(self._num_processes))
        gateway = ("gateway", "--model", str(self._model), *processes)
        with ExitStack() as stack:
            where = ("--port", str(ports.scheduler))
            sending = stack.enter_context(
                process(*source, *where, *size, log=self._log, stdout=subprocess.PIPE)
            )
            listens = ("--http-port", str(ports.gateway_http)), (
                "--grpc-port", str(ports.gateway_grpc),
            )  # fmt: skip
            scheduler = ("--scheduler", f"127.0.0.1:{ports.scheduler}")
            served = stack.enter_context(
                process(*gateway, *scheduler, *listens[0], *listens[1], log=self._log)
            )
            wait_until_ready(ports, Path(self._log.name))
            assert sending.stdout is not None
            for _ in range(self._num_processes):
                sending.stdout.readline()  # a session is open
            for _ in range(READY_CHECKS * self._num_processes):  # each may go to another process
                wait_until_ready(ports, Path(self._log.name))
            yield GatewayProcess(served), sending

    def _readers(
        self, api: str, ports: Ports, streams: int, tokens: int, repeat: int = 1
    ) -> "subprocess.Popen[bytes]":
        port = ports.gateway_http if api == "sse" else ports.gateway_grpc
        size = ["--streams", str(streams), "--tokens", str(tokens), "--repeat", str(repeat)]
        if self._num_processes > 1:  # a connection is one process's
            size += ["--connections", str(CONNECTIONS)]
        arguments = ("readers", "--model", str(self._model), "--api", api, "--port", str(port))
        return subprocess.Popen(
            [sys.executable, "-m", "bench.gateway.peers", *arguments, *size],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip

    def throughput(
        self, api: str, rate: float, streams: int, tokens: int, clients: int
    ) -> GatewayMeasurement:
        """Streams everything once to warm up, then once measured."""
        ports, shares = free_ports(), [streams // clients] * clients
        with self._serving(ports, sum(shares), tokens, rate) as (gateway, source):
            empty_kib = gateway.memory_kib()
            warm = _round(source, gateway, [self._readers(api, ports, n, tokens) for n in shares])
            run = _round(source, gateway, [self._readers(api, ports, n, tokens) for n in shares])
        num_tokens = sum(shares) * tokens
        seconds = max(one["ended_s"] for one in run.told) - run.sent_s[0]
        delays_ms = [
            (at_s - run.sent_s[number - 1]) * 1e3
            for one in run.told
            for stream in one["timed"]
            for at_s, number in stream
            if number
        ]
        return GatewayMeasurement(
            api=api,
            offered_per_s=rate,
            tokens_per_s=num_tokens / seconds,
            tokens_per_cpu_s=num_tokens / run.cpu_s,
            cpu_us_per_token=1e6 * run.cpu_s / num_tokens,
            cpu_share=run.cpu_s / seconds,
            tokens_per_message=num_tokens / sum(one["num_messages"] for one in run.told),
            delay_p50_ms=float(np.median(delays_ms)),
            delay_p99_ms=float(np.quantile(delays_ms, 0.99)),
            memory_per_stream_kib=(warm.live_kib - empty_kib) / sum(shares),
        )

    def first_byte_ms(self, api: str) -> float:
        """Median time to the first byte, minus the source's time, in ms; one request at a time."""
        ports = free_ports()
        with self._serving(ports, 1, 1, 0.0) as (_, source):
            told = _lines(self._readers(api, ports, 1, 1, FIRST_BYTES))
            assert source.stdout is not None
            said = [json.loads(source.stdout.readline()) for _ in range(2 * FIRST_BYTES)]
        return 1e3 * statistics.median(
            float(one["first_s"] - one["began_s"] - (sent["sent_s"][0] - there["submitted_s"]))
            for one, there, sent in zip(told, said[::2], said[1::2], strict=True)
        )


@dataclass(frozen=True, slots=True)
class Round:
    """Results of all clients, from their start to the end of the last stream."""

    told: list[dict[str, Any]]
    sent_s: list[float]  # by step
    cpu_s: float  # of the gateway, from the first step on
    live_kib: int  # its memory once all streams were open


def _round(
    source: "subprocess.Popen[bytes]",
    gateway: GatewayProcess,
    clients: list["subprocess.Popen[bytes]"],
) -> Round:
    assert source.stdout is not None
    if not select.select([source.stdout], [], [], READY_TIMEOUT_S)[0]:
        raise RuntimeError("the clients' streams do not reach the scheduler")
    source.stdout.readline()  # all streams are open; the first step follows shortly
    before_s, live_kib = gateway.cpu_s(), gateway.memory_kib()
    told = [line for client in clients for line in _lines(client)]
    cpu_s = gateway.cpu_s() - before_s
    return Round(told, json.loads(source.stdout.readline())["sent_s"], cpu_s, live_kib)


def _lines(client: "subprocess.Popen[bytes]") -> list[dict[str, Any]]:
    said, _ = client.communicate(timeout=120)
    if client.returncode:
        raise RuntimeError(f"a client ended with {client.returncode}")
    return [json.loads(line) for line in said.splitlines()]


@contextmanager
def with_tokenizer(model: Path | None) -> Iterator[Path]:
    """A folder with a tokenizer: the default model's, or that of `model`, made if it has none."""
    if model is None or (model / "tokenizer.json").exists():
        yield model or folder.ensure()
        return
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as made:
        config = json.loads(Path(shutil.copy(model / "config.json", made)).read_text())
        vocabulary.write(Path(made), config["vocab_size"])
        yield Path(made)


def tell(line: GatewayMeasurement) -> str:
    """One row of the table."""
    offered = f"{line.offered_per_s:,.0f}" if line.offered_per_s else "all"
    return (
        f"{line.api:6}{offered:>10}{line.tokens_per_s:>11,.0f}{line.tokens_per_cpu_s:>13,.0f}"
        f"{line.cpu_us_per_token:>9.1f}{100 * line.cpu_share:>7.0f}{line.tokens_per_message:>9.2f}"
        f"{line.delay_p50_ms:>9.1f}{line.delay_p99_ms:>9.1f}{line.memory_per_stream_kib:>9.0f}"
    )


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("bench.gateway", __doc__)
    parser.add_argument("--apis", nargs="+", choices=("sse", "grpc"), default=("sse", "grpc"))
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="tokens/s; 0: all")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="per stream")
    parser.add_argument("--clients", type=int, default=2, help="processes that read")
    parser.add_argument("--processes", type=int, default=1, help="of the gateway")
    parser.add_argument("--model", type=Path, help="model folder (default: the default model)")
    parser.add_argument("--json", type=Path, help="append one JSON object per line")
    args = parser.parse_args(arguments)
    where = {"hardware": hardware(), "commit": commit(), "streams": args.streams}
    where["processes"] = args.processes
    print(
        f"{where['hardware']}, commit {where['commit']}, {args.streams} streams, "
        f"gateways: {args.processes}"
    )
    print(
        f"{'':6}{'offered/s':>10}{'tokens/s':>11}{'per CPU s':>13}{'us/token':>9}{'CPU %':>7}"
        f"{'per msg':>9}{'p50 ms':>9}{'p99 ms':>9}{'KiB':>9}"
    )
    with (
        tempfile.NamedTemporaryFile(prefix="pagewire-bench-", suffix=".log") as log,
        with_tokenizer(args.model) as model,
    ):
        bench = GatewayBench(model, log, args.processes)
        for api in args.apis:
            first_ms = bench.first_byte_ms(api)
            print(f"{api:6}first byte {first_ms:.2f} ms after the request, without the scheduler")
            for rate in args.rates:
                line = bench.throughput(api, rate, args.streams, args.tokens, args.clients)
                print(tell(line), flush=True)
                if args.json:
                    with args.json.open("a", encoding="utf-8") as lines:
                        lines.write(
                            json.dumps(where | asdict(line) | {"first_byte_ms": first_ms}) + "\n"
                        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
