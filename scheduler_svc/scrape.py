"""Metrics of a scheduler for Prometheus: its counters, and the state of its cores now."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from scheduler_svc.core import Scheduler
from scheduler_svc.core.kv.tier import TierCounts
from scheduler_svc.engine import Engine
from scheduler_svc.group import WorkerGroup
from scheduler_svc.metrics import declared
from scheduler_svc.metrics.counts import SchedulerCounts
from wire.metrics.book import Book
from wire.metrics.exposition import process_metrics
from wire.metrics.grpc_calls import declared_calls

SERVICES = (
    "pagewire.v1.SchedulerService",
    "pagewire.v1.DebugService",
    "pagewire.v1.FleetService",
    "pagewire.v1.LiveService",
    "grpc.health.v1.Health",
)
_PREFIX = "pagewire_scheduler_"
_WORKER = ("worker",)


def make_book() -> Book:
    """The layout of all that this process counts."""
    return Book((*declared.OWN, *declared_calls(SERVICES)))


@dataclass(frozen=True, slots=True)
class _OfCore:
    """A number of one core; counters end in `_total`."""

    name: str
    text: str
    of: Callable[[Scheduler], float]


def _of_tier(
    name: str,
    text: str,
    sizes: tuple[Callable[[Scheduler], int], Callable[[Scheduler], int]],
    counts: Callable[[Scheduler], TierCounts],
) -> tuple[_OfCore, ...]:
    """The numbers of one tier; `sizes` are its blocks, and those that hold something."""
    return (
        _OfCore(f"{name}_blocks", text, sizes[0]),
        _OfCore(
            f"{name}_cached_blocks", "Of these, blocks in which a prefix can be found.", sizes[1]
        ),
        _OfCore(
            f"{name}_fetched_blocks_total",
            "Blocks that came from there: hits of the tier.",
            lambda c: counts(c).num_fetched,
        ),
        _OfCore(
            f"{name}_not_fetched_blocks_total",
            "Blocks that were to come, and were computed: the copy was late or failed.",
            lambda c: counts(c).num_not_fetched,
        ),
        _OfCore(
            f"{name}_stored_blocks_total",
            "Blocks stored there.",
            lambda c: counts(c).num_stored,
        ),
        _OfCore(
            f"{name}_not_stored_blocks_total",
            "Blocks dropped: too many were on their way there, or the copy failed.",
            lambda c: counts(c).num_not_stored,
        ),
    )


_OF_CORES = (
    _OfCore("requests_running", "Requests that hold a slot.", lambda c: c.num_running),
    _OfCore(
        "requests_waiting",
        "Requests without a slot, preempted ones included.",
        lambda c: c.num_waiting,
    ),
    _OfCore(
        "requests_preempted",
        "Of these, requests that have lost a slot.",
        lambda c: c.view.num_preempted,
    ),
    _OfCore(
        "requests_waiting_for_grammar",
        "Waiting requests whose grammar the worker has not prepared.",
        lambda c: c.view.num_preparing,
    ),
    _OfCore(
        "requests_suspect",
        "Requests that compute alone, since a process died in their last step.",
        lambda c: c.view.num_suspects,
    ),
    _OfCore(
        "waiting_tokens", "Tokens of the waiting requests.", lambda c: c.view.num_waiting_tokens
    ),
    _OfCore("slots", "Most requests that run at once.", lambda c: c.config.max_num_seqs),
    _OfCore("kv_blocks", "KV blocks that requests may hold.", lambda c: c.view.num_blocks),
    _OfCore("kv_free_blocks", "Of these, blocks not in use.", lambda c: c.view.num_free_blocks),
    _OfCore(
        "kv_cached_blocks",
        "Blocks in which a prefix can be found.",
        lambda c: c.view.num_cached_blocks,
    ),
    _OfCore(
        "kv_usage_ratio", "Share of the KV blocks in use, 0 to 1.", lambda c: c.view.block_usage
    ),
    _OfCore(
        "state_snapshots",
        "Snapshots of states that the worker has room for.",
        lambda c: c.view.num_state_snapshots,
    ),
    _OfCore(
        "state_cached_snapshots",
        "Of these, snapshots after which a prompt can begin.",
        lambda c: c.view.num_cached_snapshots,
    ),
    _OfCore("host_blocks", "Blocks in host memory.", lambda c: c.view.num_host_blocks),
    _OfCore(
        "host_free_blocks",
        "Of these, blocks that hold nothing.",
        lambda c: c.view.num_free_host_blocks,
    ),
    *_of_tier(
        "tier",
        "Blocks of host memory for what prompts have computed.",
        (lambda c: c.transfers.num_tier_blocks, lambda c: c.transfers.num_held_tier_blocks),
        lambda c: c.transfers.counts,
    ),
    *_of_tier(
        "disk_tier",
        "Blocks of the workers' disks for what prompts have computed.",
        (lambda c: c.transfers.num_disk_blocks, lambda c: c.transfers.num_held_disk_blocks),
        lambda c: c.transfers.disk_counts,
    ),
    _OfCore(
        "pulled_blocks_total",
        "Blocks that came from another worker with a request.",
        lambda c: c.peer_moves.counts.num_pulled,
    ),
    _OfCore(
        "not_pulled_blocks_total",
        "Blocks that were to come with a request, and were computed.",
        lambda c: c.peer_moves.counts.num_not_pulled,
    ),
    _OfCore("accepted_requests_total", "Requests accepted.", lambda c: c.num_accepted),
    _OfCore("steps_total", "Steps planned.", lambda c: c.counters.num_steps),
    _OfCore(
        "capped_steps_total",
        "Steps whose prompt tokens were held back for --target-itl-ms.",
        lambda c: c.counters.num_capped_steps,
    ),
    _OfCore(
        "prefill_tokens_total",
        "Prompt tokens computed; cached ones are not, those computed again are.",
        lambda c: c.counters.num_prefill_tokens,
    ),
    _OfCore("output_tokens_total", "Tokens sampled.", lambda c: c.num_output_tokens),
    _OfCore("drafts_total", "Drafts verified.", lambda c: c.counters.num_drafts),
    _OfCore("drafted_tokens_total", "Tokens in them.", lambda c: c.counters.num_drafted_tokens),
    _OfCore(
        "accepted_tokens_total",
        "Of these, tokens that came true.",
        lambda c: c.counters.num_accepted_tokens,
    ),
    _OfCore(
        "prefix_query_tokens_total",
        "Prompt tokens looked up in the prefix cache.",
        lambda c: c.counters.prefix_query_tokens,
    ),
    _OfCore(
        "prefix_hit_tokens_total", "Of these, tokens found.", lambda c: c.counters.prefix_hit_tokens
    ),
    _OfCore(
        "returned_query_tokens_total",
        "Tokens looked up in the prefix cache for requests that came back without their KV.",
        lambda c: c.counters.returned_query_tokens,
    ),
    _OfCore(
        "returned_hit_tokens_total",
        "Of these, tokens found.",
        lambda c: c.counters.returned_hit_tokens,
    ),
    _OfCore(
        "evictions_total",
        "Blocks taken although a prefix could have been found in them.",
        lambda c: c.view.num_evictions,
    ),
    _OfCore(
        "awaited_evictions_total",
        "Of these, blocks that a waiting request would have found (--cache-policy sessions).",
        lambda c: c.view.num_awaited_evicted,
    ),
    _OfCore(
        "sessions",
        "Sessions that the prefix cache knows (--cache-policy sessions).",
        lambda c: len(c.view.sessions),
    ),
    _OfCore(
        "preemptions_total", "Times that a request lost its slot.", lambda c: c.view.num_preemptions
    ),
    _OfCore(
        "forks_total", "Requests that took a prompt's KV over.", lambda c: c.counters.num_forks
    ),
    _OfCore("swapped_out_blocks_total", "Blocks to the host.", lambda c: c.view.num_swapped_out),
    _OfCore("swapped_in_blocks_total", "Blocks from the host.", lambda c: c.view.num_swapped_in),
    _OfCore(
        "swapped_dropped_blocks_total",
        "Blocks to the host that were not needed there: shared again, ended or lost.",
        lambda c: c.view.num_swapped_dropped,
    ),
    _OfCore(
        "migrated_out_total",
        "Requests that moved to other worker groups.",
        lambda c: c.migration.num_migrated_out,
    ),
    _OfCore(
        "migrated_in_total",
        "Requests that moved here from others.",
        lambda c: c.migration.num_migrated_in,
    ),
)


class SchedulerScrape:
    """Reads the metrics. Belongs to the event loop's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """All families."""
        counts = self._engine.counts
        totals = [*counts.row]
        yield from counts.book.read(totals)
        for one in _OF_CORES:
            yield self._of_cores(one)
        yield from self._of_groups()
        active = "1; 0: it stands by for another scheduler."
        yield GaugeMetricFamily(_PREFIX + "active", active, float(not self._engine.stands_by))
        yield from _of_tenants(counts)
        yield from self._as_vllm(counts, totals)
        yield from process_metrics({})

    def _of_cores(self, one: _OfCore) -> Metric:
        is_counter = one.name.endswith("_total")
        make = CounterMetricFamily if is_counter else GaugeMetricFamily
        family = make(_PREFIX + one.name, one.text, labels=_WORKER)
        for group in self._engine.groups:
            if group.core is not None:
                family.add_metric([group.address], float(one.of(group.core)))
        return family

    def _of_groups(self) -> Iterator[Metric]:
        ready = _group_gauge("worker_ready", "Whether a worker is attached: 1, or 0.")
        epoch = _group_gauge("worker_epoch", "Term under which it is attached.")
        backlog = _group_gauge("backlog_seconds", "Until all its requests would have ended.")
        losses = CounterMetricFamily(
            _PREFIX + "worker_losses_total",
            "Times that its worker was lost; each began a recovery.",
            labels=_WORKER,
        )
        dropped = CounterMetricFamily(
            _PREFIX + "kv_event_batches_dropped_total",
            "Batches of KV events that found no room to wait.",
            labels=_WORKER,
        )
        for group in self._engine.groups:
            ready.add_metric([group.address], float(group.is_ready))
            epoch.add_metric([group.address], float(group.epoch))
            losses.add_metric([group.address], float(group.num_recoveries))
            num_dropped = 0 if group.publisher is None else group.publisher.num_dropped
            dropped.add_metric([group.address], float(num_dropped))
            backlog_s = _backlog_s(group)
            if backlog_s is not None:
                backlog.add_metric([group.address], backlog_s)
        yield from (ready, epoch, backlog, losses, dropped, *self._tier_bytes())

    def _tier_bytes(self) -> Iterator[Metric]:
        of = "for what prompts have computed, in bytes."
        found = "Of these, bytes in which a prefix can be found."
        host = _group_gauge("tier_bytes", f"Host memory {of}")
        held_in_host = _group_gauge("tier_cached_bytes", found)
        disk = _group_gauge("disk_tier_bytes", f"Disk {of}")
        held_on_disk = _group_gauge("disk_tier_cached_bytes", found)
        for group in self._engine.groups:
            if group.core is None:
                continue
            transfers, name = group.core.transfers, [group.address]
            in_host, on_disk = (tier.bytes_per_block for tier in group.tiers)
            host.add_metric(name, float(transfers.num_tier_blocks * in_host))
            held_in_host.add_metric(name, float(transfers.num_held_tier_blocks * in_host))
            disk.add_metric(name, float(transfers.num_disk_blocks * on_disk))
            held_on_disk.add_metric(name, float(transfers.num_held_disk_blocks * on_disk))
        yield from (host, held_in_host, disk, held_on_disk)

    def _as_vllm(self, counts: SchedulerCounts, totals: list[float]) -> Iterator[Metric]:
        model = self._engine.model
        if model is None:
            return
        cores = [group.core for group in self._engine.groups if group.core is not None]
        if self._engine.config.speculative_config is not None:
            yield from _drafts_as_vllm(model.model, cores)


def _drafts_as_vllm(model: str, cores: list[Scheduler]) -> Iterator[Metric]:
    for name, text, of in declared.VLLM_DRAFTS:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([model], sum(of(core.counters) for core in cores))
        yield family


def _group_gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, text, labels=_WORKER)


def _backlog_s(group: WorkerGroup) -> float | None:
    return None if group.core is None else group.pace.backlog_s(group.core, time.monotonic())


def _of_tenants(counts: SchedulerCounts) -> Iterator[Metric]:
    texts = (
        (declared.TENANT_REQUESTS, "Requests that ended, by tenant."),
        (declared.TENANT_PROMPT_TOKENS, "Their prompt tokens."),
        (declared.TENANT_OUTPUT_TOKENS, "Their output tokens."),
    )
    if not counts.tenants:
        return
    families = [CounterMetricFamily(name, text, labels=["tenant"]) for name, text in texts]
    for tenant, had in counts.tenants.items():
        numbers = (had.num_requests, had.num_prompt_tokens, had.num_output_tokens)
        for family, number in zip(families, numbers, strict=True):
            family.add_metric([tenant], float(number))
    yield from families
