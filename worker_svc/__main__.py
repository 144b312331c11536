"""`python -m worker_svc`: reads the options, then runs the process, or several ranks of one."""

import sys
from functools import partial

from worker_svc import compile_ahead, config, ending, head_start, supervisor


def main(arguments: list[str]) -> int:
    """Runs one worker; returns the exit code."""
    options = config.parse(arguments)
    config.prepare_environment()
    if options.tensor_parallel_size > 1:
        return supervisor.run(options)
    ending.prepare()
    compiling = None if options.model is None else compile_ahead.start(options, options.model)
    head_start.begin(options)
    from worker_svc import process  # noqa: PLC0415 - loads torch, which reads the environment
    from worker_svc.server import WorkerServer  # noqa: PLC0415

    return process.run(options, partial(WorkerServer, options, compiling=compiling))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
