"""A service that notes how long its event loop computes without a look at anything else.

    python -m tests.e2e.stretches REPORT MODULE ...    the service MODULE with its words

A stretch is the CPU time of the loop's thread between two rounds of the loop: a busy machine does
not lengthen it. Each one above `NOTED_S` is a line of REPORT, with where it was.
"""

import asyncio
import json
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

NOTED_S = 0.02
TICK_S = 0.005  # between two rounds of an idle loop, and between two looks at a busy one


@dataclass(frozen=True, slots=True)
class Stretch:
    """One of them; `place` is the innermost frames after `NOTED_S`."""

    cpu_s: float
    place: list[str]


def stretches(report: Path) -> list[Stretch]:
    """All that a service noted, in their order."""
    lines = report.read_text().splitlines() if report.exists() else []
    return [Stretch(**json.loads(line)) for line in lines]


class Watch:
    """Ticks on the running loop, and looks at it from a thread."""

    def __init__(self, report: Path) -> None:
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._place: list[str] = []
        self._began_s = time.thread_time()
        threading.Thread(target=self._look, daemon=True).start()
        self._tick()

    def _tick(self) -> None:
        now_s = time.thread_time()
        stretch = Stretch(now_s - self._began_s, self._place)
        if stretch.cpu_s > NOTED_S:
            with self._report.open("a") as report:
                print(json.dumps(asdict(stretch)), file=report)
        self._place, self._began_s = [], time.thread_time()
        self._loop.call_later(TICK_S, self._tick)

    def _look(self) -> None:
        while True:
            time.sleep(TICK_S)
            if time.clock_gettime(self._clock) - self._began_s > NOTED_S and not self._place:
                frames = traceback.extract_stack(sys._current_frames()[self._thread])
                shown = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames]
                self._place = shown[-8:]


def main() -> None:
    """Runs the service; its loop is watched from its beginning."""
    report, module = Path(sys.argv[1]), sys.argv[2]
    del sys.argv[1:3]
    run = uvloop.run

    def watched_run(serving: Coroutine[Any, Any, Any], **options: Any) -> Any:
        async def watched() -> Any:
            Watch(report)
            return await serving

        return run(watched(), **options)

    uvloop.run = watched_run
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
