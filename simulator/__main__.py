"""`python -m simulator`: a worker without a model, for a scheduler process to drive.

python -m simulator --port 50053 --step-time 0.002
python -m simulator --step-time measured.json --record steps.jsonl
"""

import argparse
import json
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from scheduler_svc.core.estimate.step_time import StepTime
from simulator.capacity.step_times import BadStepTime, parse_step_time
from simulator.workers.fake_worker import FakeModel
from simulator.workers.loopback import DeviceStep, LoopbackWorker, start
from wire.server import PortInUse

logger = logging.getLogger("simulator")

_MODEL_OPTIONS = {
    "num_blocks": "KV blocks, the null block included",
    "block_size": "tokens per block",
    "max_num_seqs": "slots",
    "max_num_batched_tokens": "most tokens of one step",
    "max_model_len": "most tokens of one sequence",
    "vocab_size": "token ids are below it",
}


def _step_time(text: str) -> StepTime:
    try:
        is_base = "," not in text and not Path(text).is_file()
        return parse_step_time(f"{text},0,0" if is_base else text)
    except BadStepTime as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this process; exits with usage on a bad one."""
    parser = argparse.ArgumentParser(
        prog="python -m simulator",
        description="A worker that answers steps after a modelled time, with made-up tokens.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=50053, help="port to listen on; 0 is any")
    parser.add_argument(
        "--step-time",
        type=_step_time,
        default="0.002",
        metavar="BASE[,TOKEN,CONTEXT]|FILE",
        help="seconds per step: base, per computed token, per context token; or a file that holds "
        "these three by name, or measured steps to fit them to",
    )
    parser.add_argument("--record", type=Path, help="file for each step's duration")
    for field in fields(FakeModel):
        if field.name in _MODEL_OPTIONS:
            option = f"--{field.name.replace('_', '-')}"
            text = _MODEL_OPTIONS[field.name]
            parser.add_argument(option, type=_positive, default=field.default, help=text)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    model = FakeModel(**{name: getattr(options, name) for name in _MODEL_OPTIONS})
    records: list[DeviceStep] = []
    keep = records.append if options.record else _forget
    try:
        server, port = start(
            LoopbackWorker(model, options.step_time, keep), f"{options.host}:{options.port}"
        )
    except PortInUse as error:
        logger.error("%s", error)
        return 1
    logger.info("a fake worker listens on %s:%d", options.host, port)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    stopping.wait()
    server.stop(None)
    if options.record:
        lines = (json.dumps(asdict(record)) + "\n" for record in records)
        options.record.write_text("".join(lines), encoding="utf-8")
    return 0


def _forget(record: DeviceStep) -> None:
    """Ignores a record, because none was requested."""


if __name__ == "__main__":
    sys.exit(main())
