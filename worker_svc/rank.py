"""`python -m worker_svc.rank`: one rank of a group, started by the supervisor alone."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from worker_svc import compile_ahead, config, ending, head_start
from worker_svc.compile_ahead import CompileAhead
from worker_svc.config import WorkerConfig
from worker_svc.lifeline import Lifeline
from worker_svc.order_pipe import OrderPipe

if TYPE_CHECKING:
    from worker_svc.ranks import Ranks
    from worker_svc.server import RankServer


def main(arguments: list[str]) -> int:
    """Runs one rank; returns the exit code."""
    options = _parser().parse_args(arguments)
    settings = config.parse(options.arguments)
    config.prepare_environment()
    ending.prepare()
    lifeline = Lifeline(options.lifeline)
    lifeline.start()
    pipes = [OrderPipe(int(descriptor)) for descriptor in options.orders.split(",")]
    compiling = None
    if options.rank == 0 and settings.model is not None:
        compiling = compile_ahead.start(settings, settings.model)
    head_start.begin(settings, options.rank)
    # Loads torch, which reads the environment.
    from worker_svc import process  # noqa: PLC0415
    from worker_svc.ranks import Ranks  # noqa: PLC0415

    ranks = Ranks(options.rank, options.size, pipes)
    make_server = partial(_server, settings, ranks, lifeline, compiling)
    return process.run(settings, make_server, options.rank, options.size)


def _server(
    settings: WorkerConfig,
    ranks: "Ranks",
    lifeline: Lifeline,
    compiling: CompileAhead | None,
    on_failure: Callable[[], None],
) -> "RankServer":
    from worker_svc.follower import Follower  # noqa: PLC0415
    from worker_svc.server import WorkerServer  # noqa: PLC0415

    if ranks.rank > 0:
        return Follower(settings, on_failure, ranks)

    def tell_port() -> None:
        lifeline.say_ready(server.port)

    server = WorkerServer(settings, on_failure, ranks, tell_port, compiling)
    return server


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m worker_svc.rank", description=__doc__)
    parser.add_argument("--rank", type=int, required=True, help="which of the ranks")
    parser.add_argument("--size", type=int, required=True, help="of how many")
    parser.add_argument("--lifeline", type=int, required=True, help="socket of the supervisor")
    parser.add_argument("--orders", required=True, help="sockets between rank 0 and the others")
    parser.add_argument("arguments", nargs="*", help="the worker's options, behind --")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
