"""`python -m worker_svc`: reads the options, prepares the environment, runs the process."""

import os
import sys

from worker_svc import config


def main(arguments: list[str]) -> int:
    """Runs one worker; returns the exit code."""
    options = config.parse(arguments)
    # OpenMP threads that wait for work sleep at once. By default they spin, and on a machine
    # shared with a scheduler and a gateway they spin in the way of what they wait for: steps take
    # several times as long. OpenMP reads this when torch is loaded, hence the late import.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    from worker_svc import process  # noqa: PLC0415

    return process.run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
