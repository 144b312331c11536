"""Transfers between the core and a worker: what is told, sent, measured, awaited and recorded."""

import asyncio
from typing import Any

import numpy as np
import pytest

from pagewire.v1 import worker_pb2
from scheduler_svc.convert import to_transfers
from scheduler_svc.core import BlockTransfer, Scheduler, TransferOrders
from scheduler_svc.core.kv.chain import Chain
from scheduler_svc.core_config import core_config, tier_of
from scheduler_svc.journal.calls import TappedScheduler
from scheduler_svc.journal.events import Call, to_event
from scheduler_svc.journal.replay import compare
from scheduler_svc.journal.values import as_read
from scheduler_svc.sampling import Sampling
from scheduler_svc.transfers import LEAST_FETCHES, RETRY_S, TransferTraffic
from scheduler_svc.worker.pace import Pace
from scheduler_svc.worker.watch import Watch
from scheduler_svc.worker.watching import watch_over
from tests.pace import patience
from tests.scheduler_svc.core.builders import answer, make_request, make_scheduler
from tests.scheduler_svc.test_states_of_workers import CONFIG, worker
from wire.columns import UINT64, pack, unpack

TIERS = [
    worker_pb2.KvTier(name="a newer kind", num_blocks=5),
    worker_pb2.KvTier(name="host", num_blocks=2**32 - 1, bytes_per_block=2**40),
]


class Link:
    """A link that keeps what is sent."""

    def __init__(self) -> None:
        self.frames: list[worker_pb2.AttachRequest] = []
        self.watch = Watch(None)
        self.why_lost = ""
        self.on_transfer_done: Any = None
        self.on_tier_contents: Any = None
        self.s_since_cancel: Any = None

    async def transfer(self, frames: list[worker_pb2.AttachRequest]) -> None:
        self.frames += frames

    def lose(self, why: str, *_: object) -> None:
        self.why_lost = why

    def answer(self, transfer_id: int, num_blocks: int, duration_us: int = 0) -> None:
        done = worker_pb2.TransferDone(
            transfer_id=transfer_id, num_blocks=num_blocks, duration_us=duration_us
        )
        self.on_transfer_done(done)


def made(core: Scheduler) -> tuple[TransferTraffic, Link, list[None]]:
    link, woken = Link(), list[None]()
    traffic = TransferTraffic(core, link, lambda: woken.append(None))  # type: ignore[arg-type]
    return traffic, link, woken


def compute(core: Scheduler, name: str, prompt: object) -> None:
    core.add(make_request(name, prompt, max_tokens=1, sampling=Sampling(0.0, 1.0, 0, 0.0, 1)))  # type: ignore[arg-type]
    while core.find(name) is not None and core.schedule() is not None:
        answer(core, 500)


@pytest.mark.parametrize(
    ("fields", "num_blocks"),
    [
        ({"protocol_minor": 5, "tiers": TIERS}, 2**32 - 1),
        ({"protocol_minor": 4, "tiers": TIERS}, 0),
        ({"protocol_minor": 5}, 0),
        ({"protocol_minor": 5, "tiers": TIERS[:1]}, 0),
        ({"protocol_minor": 5, "tiers": TIERS, "has_states": True}, 0),
        ({"protocol_minor": 5, "tiers": TIERS, "kv_groups": [{"block_size": 16, "window": 8}]}, 0),
    ],
)
def test_only_a_tier_that_both_sides_know_is_used(fields: dict[str, Any], num_blocks: int) -> None:
    told = worker(**fields)
    assert (
        tier_of(told, "host").num_blocks == num_blocks == core_config(CONFIG, told).num_tier_blocks
    )


def test_orders_are_columns_of_the_whole_range() -> None:
    most = 2**64 - 1
    keys = np.array([[most, 0], [7, most]], dtype=np.uint64)
    one = BlockTransfer(most, [1, 2**31 - 1], [5, 4], keys)
    fetch, store, cancel = to_transfers(TransferOrders((one,), (one,), (3, most)))
    for message in (fetch.fetch, store.store):
        assert (message.transfer_id, message.tier) == (most, "host")
        assert unpack(message.block_ids).tolist() == [1, 2**31 - 1]
        assert unpack(message.tier_block_ids).tolist() == [5, 4]
        assert unpack(message.keys, UINT64).tolist() == [most, 0, 7, most]
    assert list(cancel.cancel_transfers.transfer_ids) == [3, most]


async def test_the_time_that_is_waited_follows_what_blocks_took() -> None:
    core = make_scheduler(blocks=60, num_tier_blocks=60)
    traffic, link, woken = made(core)
    compute(core, "a", 41)
    await traffic.send()
    link.answer(link.frames[0].store.transfer_id, 10, duration_us=5_000_000)  # half a second each
    assert len(woken) == 1
    for number in range(6):
        compute(core, f"other {number}", range(100 * number + 100, 100 * number + 163))
    core.add(make_request("back", 41, max_tokens=1))
    assert core.schedule() is None
    await traffic.send()
    assert core.next_deadline_s is not None
    assert core.next_deadline_s - core.now_s == pytest.approx(50.0, abs=1.0)


def stored_on_disk(core: Scheduler, prompt: int) -> None:
    """Lets a disk hold a prompt that the device does not."""
    sequence = make_scheduler().add(make_request("as another scheduler", prompt))
    core.transfers.hear_disk(Chain.of(sequence, 0, prompt // 4, 4).keys)


async def test_a_disk_that_takes_longer_than_computing_is_asked_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = make_scheduler(blocks=60, num_disk_blocks=500)
    link, now_s = Link(), [100.0]
    monkeypatch.setattr("scheduler_svc.transfers.time.monotonic", lambda: now_s[0])
    traffic = TransferTraffic(core, link, lambda: None, s_per_token=lambda: 0.001)  # type: ignore[arg-type]
    stored_on_disk(core, 61)
    asked = list[bool]()
    core.transfers.ask_disk = asked.append  # type: ignore[method-assign]
    for number in range(LEAST_FETCHES):
        core.add(make_request(f"{number}", 13 + 4 * number, max_tokens=1))
        assert core.schedule() is None and not asked, "it is judged by several"
        await traffic.send()
        fetch = [one.fetch for one in link.frames if one.HasField("fetch")][-1]
        num_blocks = len(unpack(fetch.block_ids))
        assert fetch.tier == "disk" and not fetch.tier_block_ids and fetch.contents
        link.answer(fetch.transfer_id, num_blocks, duration_us=4_100 * num_blocks)
        core.schedule()
        answer(core, 500)
    assert asked == [False], "4.1 ms for what takes 4.0 to compute"
    now_s[0] += RETRY_S + 1
    await traffic.send()
    assert asked == [False, True]


async def test_what_a_worker_tells_of_its_disk_is_found_and_no_more_than_whole_keys() -> None:
    core = make_scheduler(blocks=60, num_disk_blocks=500)
    _, link, woken = made(core)
    keys = pack(list(range(8)), UINT64)
    link.on_tier_contents(worker_pb2.TierContents(tier="a newer kind", keys=keys))
    assert core.transfers.num_held_disk_blocks == 0
    link.on_tier_contents(worker_pb2.TierContents(tier="disk", keys=keys + pack([9], UINT64)))
    assert core.transfers.num_held_disk_blocks == 4 and len(woken) == 1


async def test_a_worker_that_answers_no_cancelled_transfer_is_lost() -> None:
    core = make_scheduler(blocks=16, num_tier_blocks=60)
    traffic, link, _ = made(core)
    for name, first in {"a": 1, "b": 100, "c": 200}.items():
        compute(core, name, range(first, first + 50))
        await traffic.send()
        for frame in link.frames:
            link.answer(frame.store.transfer_id, 4)
        link.frames.clear()
    core.add(make_request("back", 41, max_tokens=1))
    assert core.schedule() is None
    await traffic.send()
    core.abort("back")
    await traffic.send()
    assert [frame.WhichOneof("frame") for frame in link.frames] == ["fetch", "cancel_transfers"]
    watched: Any = link
    async with asyncio.timeout(patience(30)):
        await watch_over(watched, core, Pace(None), 0.2, lambda: False)
    assert link.why_lost == "no answer to a transfer within 0.2 s of its cancellation"
    assert link.s_since_cancel(5.0) > 5.0
    link.answer(link.frames[0].fetch.transfer_id, 0)
    assert link.s_since_cancel(5.0) == 0.0


def test_a_recording_of_transfers_replays_and_tells_another_order_apart() -> None:
    calls: list[Call] = []
    like = make_scheduler(blocks=16, num_tier_blocks=60)

    def tap(*call: Any) -> None:
        calls.append(Call(*call))

    core = TappedScheduler(like.config, tap)
    for name, first in {"a": 1, "b": 100, "c": 200, "a again": 1}.items():
        compute(core, name, range(first, first + 50))
        if (orders := core.transfers.take_transfers(0.5)) is not None:
            for one in (*orders.fetches, *orders.stores):
                core.transfers.transfer_done(one.transfer_id, 3)
        while core.schedule() is not None:
            answer(core, 500)
    assert core.transfers.counts.num_fetched == 3 and not core.num_waiting
    events = [to_event(number, call) for number, call in enumerate(calls)]
    for event in events:
        assert compare(event, like) is None
        like = as_read(like)  # as where a recording is cut
    fewer = Scheduler(core.config)
    taken = next(event for event in events if event.call == "take_transfers")
    divergence = compare(taken, fewer)
    assert divergence is not None and "outcome" in divergence.field
