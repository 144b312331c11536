"""A grammar whose turn comes while nothing runs is asked for at once: no answer would do it."""

from types import SimpleNamespace
from typing import Any

from scheduler_svc.clients.registry import Clients
from scheduler_svc.core import GRAMMAR
from scheduler_svc.explain.trace import Trace
from scheduler_svc.metrics.counts import SchedulerCounts
from scheduler_svc.observe.request_spans import RequestSpans
from scheduler_svc.sampling import Sampling
from scheduler_svc.stepping import Stepping
from scheduler_svc.worker.pace import Pace
from tests.scheduler_svc.conftest import service_config
from tests.scheduler_svc.core.builders import make_request, make_scheduler


class AskedLink:
    """A worker link that keeps what it was asked to prepare."""

    def __init__(self) -> None:
        description = SimpleNamespace(max_granted_steps=0, has_state_hashes=False)
        self.attached = SimpleNamespace(description=description)
        self.prepared: list[Any] = []

    async def prepare(self, preparations: Any) -> None:
        self.prepared.append(preparations)

    async def send(self, step: Any) -> None:
        raise AssertionError("no step can run before the grammar is ready")


async def test_a_grammar_that_was_ready_on_a_lost_worker_is_asked_for_at_its_turn() -> None:
    """Seen in a soak: seed 302, episode 180."""
    core = make_scheduler(prepared_kinds=(GRAMMAR.kind,))
    sampling = Sampling(0.0, 1.0, 0, 0.0, seed=1, grammar="start: /a/")
    core.add(make_request("a", 3, requirements=(GRAMMAR,), sampling=sampling))
    asked = core.take_preparations()
    assert asked is not None
    core.prepared(asked.wanted[0].preparation_id)
    core.worker_lost()
    core.worker_back()
    link: Any = AskedLink()
    config = service_config(1)
    counts = SchedulerCounts(config.metrics_tenants)
    clients = Clients(counts, RequestSpans())
    stepping = Stepping(config, core, link, clients, Trace(), Pace())
    await stepping.plan_ahead()
    assert not stepping.awaits_answer
    assert len(link.prepared) == 1
