"""`python -m worker_svc`: reads the options, prepares the environment, runs the process."""

import os
import sys

from worker_svc import config


def main(arguments: list[str]) -> int:
    """Runs one worker; returns the exit code."""
    options = config.parse(arguments)
    # OpenMP threads that wait for work spin for as long as a pause inside a step takes, then sleep.
    # By default they spin on, in the way of the scheduler and the gateway that they wait for; were
    # they to sleep at once, waking them a hundred times a step would take a third of it. OpenMP
    # reads this when torch is loaded, hence the late import.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from worker_svc import process  # noqa: PLC0415

    return process.run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
