"""Options of the scheduler process, read once from the command line."""

import argparse
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """How to reach the worker, where to listen, and the policy's limits."""

    worker: str  # host:port of the worker group's leader
    host: str
    port: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    enable_prefix_caching: bool
    lookahead: int  # steps planned before the result of the one running is known
    step_timeout_s: float  # a step that takes longer means a hung worker

    def __post_init__(self) -> None:
        if self.lookahead not in (0, 1):
            raise ValueError(f"lookahead is {self.lookahead}, must be 0 or 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs})"
            )
        if self.step_timeout_s <= 0:
            raise ValueError(f"step_timeout_s is {self.step_timeout_s}, must be positive")


def parse(arguments: list[str] | None = None) -> ServiceConfig:
    """The configuration of this process; exits with usage on a bad option."""
    parser = argparse.ArgumentParser(
        prog="python -m scheduler_svc",
        description="Queues, places and runs requests on a worker group.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--worker", default="127.0.0.1:50053", help="the worker group's leader")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=50052, help="port to listen on")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="most running requests")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, help="most tokens of one step"
    )
    parser.add_argument(
        "--long-prefill-token-threshold",
        type=int,
        default=0,
        help="most prompt tokens of one request in a step; 0 is no limit",
    )
    parser.add_argument(
        "--no-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="compute every prompt anew",
    )
    parser.add_argument(
        "--lookahead",
        type=int,
        default=1,
        help="steps planned before the running one's result is known: 0 or 1",
    )
    parser.add_argument(
        "--step-timeout-s",
        type=float,
        default=60.0,
        help="seconds after which a step counts as hung and the worker as lost",
    )
    try:
        return ServiceConfig(**vars(parser.parse_args(arguments)))
    except ValueError as error:
        parser.error(str(error))
