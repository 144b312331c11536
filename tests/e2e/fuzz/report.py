"""Counts what came of the cases, and keeps those with a problem."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness.stack import Death
from tests.e2e.fuzz.case import Case, CaseVerdict

MAX_KEPT = 3  # cases of one problem


@dataclass(slots=True)
class FuzzReport:
    """The results of one run."""

    findings: Path | None  # where cases with problems are kept
    statuses: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    problems: Counter[tuple[str, str]] = field(default_factory=Counter)
    deaths: list[Death] = field(default_factory=list)

    def add(self, case: Case, verdict: CaseVerdict) -> None:
        """Counts one case."""
        self.statuses[case.target][verdict.status] += 1
        if verdict.problem:
            self.add_problem(case, verdict.problem)

    def add_problem(self, case: Case, problem: str) -> None:
        """Counts a problem, by its words without numbers, and keeps its first cases."""
        kind = re.sub(r"'[^']*'|\d+", "_", problem)[:90]
        self.problems[case.target, f"{case.name}: {kind}"] += 1
        if self.findings is not None and self.problems[case.target, f"{case.name}: {kind}"] <= (
            MAX_KEPT
        ):
            case.save(self.findings, problem)

    @property
    def is_clean(self) -> bool:
        """True if nothing was found."""
        return not self.problems and not self.deaths

    def __str__(self) -> str:
        lines = []
        for target, counts in self.statuses.items():
            told = ", ".join(f"{status} {count:,}" for status, count in counts.most_common())
            lines.append(f"{target}: {counts.total():,} cases: {told}")
        lines += [f"DIED {d.service} with {d.status}: {d.log_tail[-300:]}" for d in self.deaths]
        lines += [f"{n:,} x {target} {what}" for (target, what), n in self.problems.most_common()]
        return "\n".join([*lines, "clean" if self.is_clean else "NOT clean"])
