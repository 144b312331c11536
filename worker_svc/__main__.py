"""`python -m worker_svc`: parses the options and runs one worker process or a group of ranks."""

import atexit
import os
import sys
from functools import partial
from typing import NoReturn

from pagewire.hub.download import ModelUnavailable
from pagewire.settings import home
from worker_svc import config
from worker_svc.process import exit_codes
from worker_svc.ranks import supervisor
from worker_svc.startup import precompile, preload


def main(arguments: list[str]) -> int:
    """Runs a worker; returns the exit code."""
    home.settle()
    try:
        options = config.parse(arguments)
    except ModelUnavailable as error:
        sys.stderr.write(f"--model: {error}\n")
        return 1
    config.prepare_environment()
    if options.tensor_parallel_size > 1:
        return supervisor.run(options)
    exit_codes.prepare()
    compiling = None if options.model is None else precompile.start(options, options.model)
    preload.begin(options)
    from worker_svc.serving import process  # noqa: PLC0415 - torch reads the environment
    from worker_svc.serving.server import WorkerServer  # noqa: PLC0415

    return process.run(options, partial(WorkerServer, options, compiling=compiling))


def exit_at_once(code: int) -> NoReturn:
    """Ends the process after its exit functions, without taking torch's modules apart: 0.6 s."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))
