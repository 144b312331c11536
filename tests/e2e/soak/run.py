"""One soak: twins on a calm server, then load with cancels and kills, then the checks."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.harness.services import ProductFailed
from tests.e2e.soak.clients import WAYS, AnswerCut, Customer, SoakAnswer
from tests.e2e.soak.product import SoakedProduct, draw_victim
from tests.e2e.soak.wishes import Wish, draw

CANCELS = 0.15  # of all requests
KILLS_UNTIL = 0.5  # of the time; in the rest memory must be flat
BACK_WITHIN_S = 60.0
GRACE_S = 40.0  # after a kill a request over HTTP may end with an error
IDLE_WITHIN_S = 60.0
WARM_FRACTION, WARM_S = 0.4, 600.0  # of the time without kills, at most
MAX_GROWTH, SLACK_MIB = 1.05, 4.0
LEAST_CALM_S = 30.0  # in less a service may not have had its largest step yet
MAX_TOLD = 20


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """The length and the load of a run."""

    minutes: float
    seed: int = 0
    num_wishes: int = 64
    num_customers: int = 12
    kills_per_minute: float = 2.0


@dataclass(slots=True)
class SoakOutcome:
    """Counts and problems of a soak; without problems it held."""

    num_whole: Counter[str] = field(default_factory=Counter)  # by kind and way
    num_cancelled: int = 0
    num_cut: int = 0  # after a kill
    kills: Counter[str] = field(default_factory=Counter)
    rss_mib: list[tuple[float, dict[str, float]]] = field(default_factory=list)  # by minute
    problems: list[str] = field(default_factory=list)


class Soak:
    """The state that the threads share."""

    def __init__(
        self, product: SoakedProduct, options: SoakOptions, tell: Callable[[str], None]
    ) -> None:
        self._product, self._options, self._tell = product, options, tell
        self._customer = Customer(product.ports.gateway_http, product.ports.gateway_grpc)
        self._wishes = draw(options.num_wishes, options.seed)
        self._twins: list[SoakAnswer] = []
        self._killed_s = -GRACE_S  # the last kill, or when all was back after it
        self._lock = threading.Lock()
        self._ends_s = 0.0
        self.outcome = SoakOutcome()

    def run(self) -> SoakOutcome:
        """Everything in order."""
        rng = random.Random(self._options.seed)
        self._twins = [self._customer.ask(wish, "http", rng) for wish in self._wishes]
        self._tell(f"{len(self._twins)} twins answered")
        self._ends_s = time.monotonic() + self._options.minutes * 60
        threads = [
            threading.Thread(target=self._ask, args=(random.Random(f"{self._options.seed} {n}"),))
            for n in range(self._options.num_customers)
        ]
        for thread in threads:
            thread.start()
        try:
            self._watch(rng)
        except ProductFailed as error:
            self._problem(f"the product failed: {error}")
            self._ends_s = 0.0
        for thread in threads:
            thread.join()
        self._check_idle()
        self._check_memory()
        return self.outcome

    # --- load ------------------------------------------------------------------------------------

    def _ask(self, rng: random.Random) -> None:
        while time.monotonic() < self._ends_s:
            index = rng.randrange(len(self._wishes))
            wish, twin = self._wishes[index], self._twins[index]
            # The SDK streams one output at a time.
            way = rng.choice(WAYS if wish.num_outputs == 1 else WAYS[:2])
            began_s = time.monotonic()
            try:
                answer = self._customer.ask(wish, way, rng, CANCELS)
            except AnswerCut as error:
                self._count_cut(wish, way, began_s, error)
                continue
            except Exception as error:  # a client that fails is a finding, too
                self._problem(f"{wish.kind} {way}: {type(error).__name__}: {error}")
                continue
            with self._lock:
                self._compare(wish, way, answer, twin)

    def _compare(self, wish: Wish, way: str, answer: SoakAnswer, twin: SoakAnswer) -> None:
        if answer.is_whole:
            self.outcome.num_whole[f"{wish.kind} {way}"] += 1
            if answer.texts != twin.texts:
                self._problem(f"{wish.kind} {way}: {answer.texts!r} is not {twin.texts!r}")
            return
        self.outcome.num_cancelled += 1
        if any(not t.startswith(a) for a, t in zip(answer.texts, twin.texts, strict=True)):
            self._problem(f"{wish.kind} {way}: {answer.texts!r} does not begin {twin.texts!r}")

    def _count_cut(self, wish: Wish, way: str, began_s: float, error: AnswerCut) -> None:
        with self._lock:
            was_killed = self._killed_s + GRACE_S > began_s
            # Through the SDK a stream that has begun ends as its twin, whatever is killed.
            if was_killed and not (way == "sdk" and error.began):
                self.outcome.num_cut += 1
            else:
                self._problem(f"{wish.kind} {way}: {str(error)[:300]}")
        time.sleep(0.2)

    def _problem(self, text: str) -> None:
        self.outcome.problems.append(text[:600])

    # --- kills and memory ------------------------------------------------------------------------

    def _watch(self, rng: random.Random) -> None:
        began_s = time.monotonic()
        calm_s = began_s + KILLS_UNTIL * (self._ends_s - began_s)
        every_s = 60 / self._options.kills_per_minute if self._options.kills_per_minute else None
        next_kill_s = began_s + (every_s or 0) * rng.random()
        next_look_s = began_s
        while (now_s := time.monotonic()) < self._ends_s:
            if now_s >= next_look_s:
                sizes = self._product.rss_mib()
                self.outcome.rss_mib.append(((now_s - began_s) / 60, sizes))
                told = ", ".join(f"{name} {size:.0f}" for name, size in sorted(sizes.items()))
                self._tell(f"minute {(now_s - began_s) / 60:.1f}: MiB {told}")
                next_look_s += min(60.0, (self._ends_s - began_s) / 10)
            if every_s is not None and next_kill_s <= now_s < calm_s:
                self._kill(draw_victim(rng))
                next_kill_s = time.monotonic() + every_s * (0.5 + rng.random())
            time.sleep(0.1)

    def _kill(self, victim: str) -> None:
        self._killed_s = time.monotonic() + BACK_WITHIN_S
        self._product.kill(victim)
        self.outcome.kills[victim] += 1
        time.sleep(0.5)
        began_s = time.monotonic()
        self._product.wait_until_ready(BACK_WITHIN_S)
        self._killed_s = time.monotonic()
        self._tell(f"killed the {victim}; ready after {self._killed_s - began_s + 0.5:.1f} s")

    # --- the end ---------------------------------------------------------------------------------

    def _check_idle(self) -> None:
        """Nothing runs or waits, and no block is held."""
        deadline_s = time.monotonic() + IDLE_WITHIN_S
        while True:
            try:
                status = self._product.status()
            except Exception as error:
                return self._problem(f"no status: {error}")
            held = status.num_blocks - status.num_free_blocks
            if not (status.num_running or status.num_waiting or held):
                return None
            if time.monotonic() > deadline_s:
                return self._problem(
                    f"not empty: {status.num_running} running, {status.num_waiting} waiting, "
                    f"{held} blocks held"
                )
            time.sleep(0.2)

    def _check_memory(self) -> None:
        """Resident memory at the end is that after the warm-up of the last incarnation.

        A run that is over soon says nothing of it.
        """
        minutes = self._options.minutes
        calm = KILLS_UNTIL * minutes if self._options.kills_per_minute else 0.0
        warm = calm + min(WARM_S / 60, WARM_FRACTION * (minutes - calm))
        samples = [sizes for minute, sizes in self.outcome.rss_mib if minute >= warm]
        if len(samples) < 2 or 60 * (minutes - warm) < LEAST_CALM_S:
            return
        for name, first in samples[0].items():
            last = samples[-1].get(name, 0.0)
            if last > MAX_GROWTH * first + SLACK_MIB:
                self._problem(f"memory of the {name}: {first:.0f} MiB, then {last:.0f}")


def told(outcome: SoakOutcome, wishes: Sequence[Wish] = ()) -> str:
    """The outcome as text."""
    by_way = Counter[str]()
    for kind, count in outcome.num_whole.items():
        by_way[kind.rpartition(" ")[2]] += count
    lines = [
        f"whole answers equal to their twins: {dict(by_way)}; cancelled {outcome.num_cancelled}; "
        f"cut or refused after a kill {outcome.num_cut}; kills {dict(outcome.kills)}"
    ]
    lines += [f"PROBLEM {problem}" for problem in outcome.problems[:MAX_TOLD]]
    return "\n".join([*lines, f"{len(outcome.problems)} problems"])
