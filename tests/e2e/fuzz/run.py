"""Runs the cases of the targets against a stack, and finds the case that ended a process."""

import asyncio
import random
from collections.abc import Sequence
from typing import Protocol

from bench.harness.stack import Stack
from tests.e2e.fuzz.case import Case, CaseVerdict
from tests.e2e.fuzz.report import FuzzReport

BATCH = 250  # cases between two looks at the processes
WIDTH = 24  # cases at once
SETTLE_S = 1.0  # from a lost answer until a process that died has ended
ALONE = frozenset({"steps", "recordings"})  # one at a time


class FuzzTarget(Protocol):
    """The receiver of cases."""

    name: str

    def draw(self, rng: random.Random) -> Case: ...

    async def run(self, case: Case) -> CaseVerdict: ...

    async def close(self) -> None: ...


async def run_all(
    targets: Sequence[FuzzTarget],
    stack: Stack,
    corpus: Sequence[Case],
    num_cases: int,
    seed: int,
    report: FuzzReport,
) -> None:
    """The corpus first, then so many drawn cases for each target."""
    for target in targets:
        runner = _Runner(target, stack, report)
        await runner.run([case for case in corpus if case.target == target.name])
        # By its name, so that a target draws the same with or without the others.
        rng = random.Random(f"{target.name} {seed}")
        for begin in range(0, num_cases, BATCH):
            await runner.run([target.draw(rng) for _ in range(min(BATCH, num_cases - begin))])
        await target.close()


class _Runner:
    def __init__(self, target: FuzzTarget, stack: Stack, report: FuzzReport) -> None:
        self._target, self._stack, self._report = target, stack, report
        self._width = 1 if target.name in ALONE else WIDTH

    async def run(self, cases: Sequence[Case]) -> None:
        """Runs the cases some at a time; after a death each that got no answer runs alone."""
        if not cases:
            return
        lost: list[tuple[Case, CaseVerdict]] = []
        free = asyncio.Semaphore(self._width)

        async def one(case: Case) -> None:
            async with free:
                verdict = await self._target.run(case)
            if verdict.was_lost:
                lost.append((case, verdict))
            else:
                self._report.add(case, verdict)

        await asyncio.gather(*map(one, cases))
        if lost or self._stack.has_death():
            await self._explain(lost)
        elif not await asyncio.to_thread(self._stack.answers):
            tails = [self._stack.log_tail(spec.name)[-500:] for spec in self._stack.specs]
            what = f"the gateway is not ready after this or before: {tails}"
            self._report.add_problem(cases[-1], what)
            self._report.deaths += self._stack.renew()

    async def _explain(self, lost: list[tuple[Case, CaseVerdict]]) -> None:
        await asyncio.sleep(SETTLE_S)
        if not self._stack.has_death():
            for case, verdict in lost:
                self._report.add(case, verdict)
            return
        self._report.deaths += self._stack.take_deaths()
        await asyncio.to_thread(self._stack.start)
        for case, _ in lost:
            verdict = await self._target.run(case)
            if verdict.was_lost:
                await asyncio.sleep(SETTLE_S)
            if self._stack.has_death():
                names = ", ".join(death.service for death in self._stack.take_deaths())
                self._report.add_problem(case, f"ended {names}")
                await asyncio.to_thread(self._stack.start)
            else:
                self._report.add(case, verdict)
