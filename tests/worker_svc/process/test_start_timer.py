"""StartTimer: phases and the time before it was created."""

import subprocess
import sys
import time

from worker_svc.process.start_timer import StartTimer, process_age_s


def test_phases_add_up_to_no_more_than_the_whole():
    clock = StartTimer(imports_s=1.5)
    with clock.phase("weights"):
        time.sleep(0.02)
    with clock.phase("cache"):
        pass
    with clock.phase("weights"):
        time.sleep(0.02)
    total, _, phases = clock.report().partition(" ms (")
    times = dict(phase.split() for phase in phases.rstrip(")").split(", "))
    assert list(times) == ["imports", "weights", "cache"]
    assert int(times["imports"]) == 1500
    assert int(times["weights"]) >= 40
    assert sum(map(int, times.values())) <= int(total) + 2  # each may be rounded up


def test_a_phase_that_fails_is_counted():
    clock = StartTimer(imports_s=0.0)
    try:
        with clock.phase("weights"):
            raise OSError("no such checkpoint")
    except OSError:
        pass
    assert "weights" in clock.report()


def test_the_age_of_a_process_counts_from_its_start_and_not_from_the_import():
    code = "import time; time.sleep(0.3); "
    code += "from worker_svc.process.start_timer import process_age_s as age"
    started_s = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", f"{code}; print(age())"], capture_output=True, text=True, check=True
    )
    assert 0.28 <= float(ran.stdout) <= time.monotonic() - started_s + 0.02
    assert process_age_s() > float(ran.stdout)
