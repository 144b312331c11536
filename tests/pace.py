"""The pace of this machine. Limits in tests are multiples of what one small job takes on it.

The job is timed once per run; `PAGEWIRE_TEST_PACE` tells the result to every process of the run.
"""

import os
import subprocess
import sys
import time

VARIABLE = "PAGEWIRE_TEST_PACE"
SERVING = "SERVING_PYTHON"  # the interpreter with the services, where that of the tests is another
JOB = "import asyncio, grpc, numpy; sum(i * i for i in range(1_000_000))"
ORDINARY_S = 0.4  # the job, on a quiet core of a usual machine
SPARE = 4.0  # for load that comes after the measurement


def pace() -> float:
    """Times that this machine takes longer than a usual one; at least 1."""
    if VARIABLE not in os.environ:
        began_s = time.monotonic()
        subprocess.run([os.environ.get(SERVING, sys.executable), "-c", JOB], check=True)
        measured = (time.monotonic() - began_s) / ORDINARY_S
        os.environ[VARIABLE] = f"{max(1.0, measured):.2f}"
    return float(os.environ[VARIABLE])


def patience(seconds: float) -> float:
    """A limit that only a failing test reaches, from seconds that are plenty on a usual machine."""
    return seconds * pace() * SPARE


def paced(seconds: float) -> float:
    """A duration that a passing test waits out, such as a time-out of the service it tests."""
    return seconds * pace()
