"""Blocks that are kept in host memory by content; the tokens after them stay the same."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from pagewire.v1 import worker_pb2
from tests.pace import patience
from tests.worker_svc.conftest import (
    WORKER_CONFIG,
    Attachment,
    Greedy,
    Worker,
    make_prompt,
    make_sequence,
    serving,
)
from tests.worker_svc.runner import tier_transfers
from tests.worker_svc.runner.tier_transfers import KEYS
from wire.columns import UINT64, pack
from worker_svc.attention.kv_cache import KVCache
from worker_svc.config import UnsupportedOption, WorkerConfig
from worker_svc.parallel.group import Group
from worker_svc.protocol.transfers import TransferEnd, TransferOrder
from worker_svc.runner.block_mover import BLOCKS_AT_ONCE
from worker_svc.runner.host_tier import HostTier
from worker_svc.startup.host_tier import num_tier_blocks, require_tiered

PROMPT = make_prompt(37, seed=3)  # two full blocks and five tokens in a third


@pytest.fixture(scope="module")
def tiered_worker(llama_folder: Path) -> Iterator[Worker]:
    with serving(replace(WORKER_CONFIG, host_tier_gib=0.001), llama_folder) as ready:
        yield ready


def transfer(attachment: Attachment, kind: str, **fields: object) -> worker_pb2.TransferDone:
    """Sends a transfer of two blocks and returns its answer."""
    return tier_transfers.transfer(attachment, kind, **({"tier": "host"} | fields))


def test_the_handshake_tells_the_tier(tiered_worker: Worker, worker: Worker) -> None:
    (tier,) = tiered_worker.describe().description.tiers
    assert tier.name == "host" and tier.num_blocks == 2**30 // 1000 // tier.bytes_per_block
    assert not worker.describe().description.tiers


def test_a_prompt_goes_on_after_fetched_blocks_as_if_it_had_computed_them(
    tiered_worker: Worker, greedy: Greedy
) -> None:
    """In other blocks, after the first ones hold a stranger's KV; on the stream after as well."""
    expected, stranger = greedy(PROMPT, 6), make_prompt(40, seed=4)
    attachment = tiered_worker.attach()
    attachment.step(
        new_sequences=[make_sequence(0, PROMPT, [1, 2, 3])], slots=[0], num_scheduled=[37]
    )
    stored = transfer(attachment, "store", block_ids=pack([1, 2]), tier_block_ids=pack([9, 4]))
    assert (stored.num_blocks, stored.problem) == (2, "") and stored.num_bytes > 0
    others = attachment.step(
        freed_slots=[0],
        new_sequences=[make_sequence(1, stranger, [3, 1, 2])],
        slots=[1],
        num_scheduled=[40],
    )
    fetched = transfer(
        attachment, "fetch", transfer_id=2, block_ids=pack([8, 7]), tier_block_ids=pack([9, 4])
    )
    assert (fetched.transfer_id, fetched.num_blocks, fetched.problem) == (2, 2, "")
    back = make_sequence(0, PROMPT, [8, 7, 6], num_computed_tokens=32)
    both = attachment.step(new_sequences=[back], slots=[1, 0], num_scheduled=[1, 5])
    tokens = [both[1]]
    others.append(both[0])
    for _ in range(5):
        both = attachment.step(slots=[1, 0])
        others.append(both[0])
        tokens.append(both[1])
    attachment.close()
    assert tokens == expected and others == greedy(stranger, 7)


def test_a_block_with_another_key_ends_a_fetch_before_it(tiered_worker: Worker) -> None:
    attachment = tiered_worker.attach()
    places = {"block_ids": pack([1, 2]), "tier_block_ids": pack([1, 2])}
    assert transfer(attachment, "store", **places).num_blocks == 2
    wrong = pack([*KEYS[:3], KEYS[3] + 1], UINT64)
    done = transfer(attachment, "fetch", transfer_id=2, keys=wrong, **places)
    assert done.num_blocks == 1 and done.problem == "block 2 of the tier holds another content"
    places["tier_block_ids"] = pack([5, 2])  # 5 was never stored
    done = transfer(attachment, "fetch", transfer_id=3, **places)
    assert done.num_blocks == 0 and done.problem == "block 5 of the tier holds another content"
    attachment.close()


@pytest.mark.parametrize(
    ("kind", "fields", "problem"),
    [
        ("fetch", {"tier": "disk"}, "fetch.tier: there is no tier 'disk'"),
        ("fetch", {"transfer_id": 0}, "fetch.transfer_id: must not be 0"),
        ("fetch", {"block_ids": [0, 1]}, "fetch.block_ids: block 0 is not in 1..63"),
        ("fetch", {"block_ids": [3, 3]}, "fetch.block_ids: a block appears twice"),
        ("store", {"tier_block_ids": [3, 3]}, "store.tier_block_ids: a block appears twice"),
        ("store", {"tier_block_ids": [0, 1]}, "store.tier_block_ids: block 0 is not in 1.."),
        ("store", {"tier_block_ids": [1]}, "store.tier_block_ids: 1 blocks for 2 store.block_ids"),
        ("store", {"block_ids": []}, "store.block_ids: there are none"),
        ("store", {"keys": b"1234567"}, "store.keys: 7 bytes are not a multiple of 8"),
        ("store", {"keys": b"12345678"}, "store.keys: 1 numbers, not two for each of 2"),
    ],
)
def test_a_transfer_that_cannot_be_made_ends_the_stream_by_its_name(
    tiered_worker: Worker, kind: str, fields: dict[str, object], problem: str
) -> None:
    attachment = tiered_worker.attach()
    named = {"block_ids": [1, 2], "tier_block_ids": [1, 2]} | fields
    packed = {name: pack(v) if isinstance(v, list) else v for name, v in named.items()}
    with pytest.raises(grpc.RpcError) as refused:
        transfer(attachment, kind, **packed)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in refused.value.details()
    attachment.cancel()


def test_a_worker_without_a_tier_refuses_a_transfer_and_takes_a_cancel(worker: Worker) -> None:
    attachment = worker.attach()
    cancel = worker_pb2.CancelTransfers(transfer_ids=[7])
    attachment.send_raw(worker_pb2.AttachRequest(cancel_transfers=cancel))
    with pytest.raises(grpc.RpcError) as refused:
        transfer(attachment, "store", block_ids=pack([1, 2]), tier_block_ids=pack([1, 2]))
    assert "store.tier: there is no tier 'host'" in refused.value.details()
    attachment.cancel()


# --- the tier alone ------------------------------------------------------------------------------


class Cache(KVCache):
    """A cache whose copies wait at a gate, and fail where it was told so."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(2, num_blocks, 4, 1, 8, torch.float32, torch.device("cpu"))
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.is_broken = False

    def read_blocks(self, block_ids: torch.Tensor) -> torch.Tensor:
        self.entered.release()
        assert self.gate.wait(patience(10))
        if self.is_broken:
            raise RuntimeError("no more of it")
        return super().read_blocks(block_ids)


class Asked:
    """A tier of a cache, and the answers in the order in which they came."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = Cache(num_blocks + 1)
        self.tier = HostTier(self.cache, num_blocks, torch.device("cpu"))
        self.answers: dict[int, TransferEnd] = {}
        self.order: list[int] = []
        self.is_over = False
        self._num_blocks = num_blocks

    def submit(self, transfer_id: int, *, is_fetch: bool) -> None:
        blocks = np.arange(1, self._num_blocks + 1)
        keys = np.stack([blocks, blocks], axis=1).astype(np.uint64)
        order = TransferOrder(transfer_id, is_fetch, blocks, blocks, keys)
        self.tier.submit(order, lambda: self.is_over, self._answer)

    def _answer(self, transfer_id: int, end: TransferEnd) -> None:
        assert transfer_id not in self.answers, "answered twice"
        self.answers[transfer_id] = end
        self.order.append(transfer_id)

    def wait(self) -> None:
        done = threading.Event()
        self.tier.when_done(done.set)
        assert done.wait(patience(10))


def test_a_transfer_that_is_cancelled_ends_after_the_blocks_under_way() -> None:
    asked = Asked(3 * BLOCKS_AT_ONCE)
    asked.cache.gate.clear()
    asked.submit(1, is_fetch=False)
    asked.submit(2, is_fetch=False)
    assert asked.cache.entered.acquire(timeout=patience(10))
    asked.tier.cancel((1, 2, 3))  # 3 was never asked for
    asked.cache.gate.set()
    asked.submit(3, is_fetch=False)
    asked.wait()
    told = {number: (end.num_blocks, end.problem) for number, end in asked.answers.items()}
    cancelled = "it was cancelled"
    assert told == {1: (BLOCKS_AT_ONCE, cancelled), 2: (0, cancelled), 3: (96, "")}


def test_the_end_of_a_stream_ends_its_transfers_before_the_next_is_greeted() -> None:
    asked = Asked(3 * BLOCKS_AT_ONCE)
    asked.cache.gate.clear()
    asked.submit(1, is_fetch=False)
    assert asked.cache.entered.acquire(timeout=patience(10))
    greeted = threading.Event()
    asked.is_over = True
    asked.tier.when_done(greeted.set)
    assert not greeted.is_set(), "a block is still read"
    asked.cache.gate.set()
    assert greeted.wait(patience(10)) and asked.answers[1].num_blocks == BLOCKS_AT_ONCE


def test_a_fetch_does_not_wait_for_a_store() -> None:
    asked = Asked(2)
    asked.submit(1, is_fetch=False)
    asked.wait()
    asked.cache.gate.clear()
    asked.submit(2, is_fetch=False)
    asked.submit(3, is_fetch=True)
    while 3 not in asked.answers:
        assert 2 not in asked.answers
    asked.cache.gate.set()
    asked.wait()
    # The store had begun to overwrite what the fetch asked for, or had not: both are whole answers.
    assert asked.order == [1, 3, 2]


def test_a_copy_that_fails_is_an_answer_and_the_next_one_works() -> None:
    asked = Asked(2)
    asked.cache.is_broken = True
    asked.submit(1, is_fetch=False)
    asked.wait()
    assert asked.answers[1].problem == "RuntimeError: no more of it"
    asked.submit(2, is_fetch=True)
    asked.wait()
    assert asked.answers[2].num_blocks == 0, "of what was not stored nothing is given out"
    asked.cache.is_broken = False
    asked.submit(3, is_fetch=False)
    asked.submit(4, is_fetch=True)
    asked.wait()
    assert asked.answers[3].num_blocks == 2


# --- the option ----------------------------------------------------------------------------------


def test_the_option_is_a_number_of_whole_blocks() -> None:
    assert num_tier_blocks(WorkerConfig(host_tier_gib=1.0), 3 << 20) == 341
    assert num_tier_blocks(WorkerConfig(host_tier_gib=0.5), 1 << 30) == 0
    assert num_tier_blocks(WorkerConfig(), 1) == 0
    for bad in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="host_tier_gib"):
            WorkerConfig(host_tier_gib=bad)


@dataclass
class Model:
    """The facts of a model that decide."""

    state_bytes: int = 0
    num_ranks: int = 1
    states: None = None

    @property
    def group(self) -> Group:
        return Group(size=self.num_ranks)


@pytest.mark.parametrize(
    ("model", "num_tables", "options", "what"),
    [
        (Model(), 2, {}, "a model with several KV groups, or a window, without --kv-groups one"),
        (Model(state_bytes=1), 1, {}, "a model with recurrent states"),
        (Model(), 1, {"draft_model": Path("drafts")}, "a draft model"),
        (Model(num_ranks=2), 1, {}, "several ranks"),
    ],
)
def test_what_has_more_than_blocks_of_one_process_is_refused_by_name(
    model: Model, num_tables: int, options: dict[str, Any], what: str
) -> None:
    require_tiered(WorkerConfig(**options), model, num_tables)  # type: ignore[arg-type]
    config = WorkerConfig(host_tier_gib=2.5, **options)
    with pytest.raises(UnsupportedOption) as refused:
        require_tiered(config, model, num_tables)  # type: ignore[arg-type]
    assert str(refused.value) == f"host_tier_gib: 2.5 cannot serve {what}"
    require_tiered(WorkerConfig(host_tier_gib=2.5), Model(), 1)  # type: ignore[arg-type]
