"""Prompts that go on at another worker: fetches of the step stream, options, description."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from pagewire.v1 import worker_pb2
from tests.worker_svc.conftest import (
    WORKER_CONFIG,
    Attachment,
    Greedy,
    Worker,
    make_prompt,
    make_sequence,
    serving,
)
from wire.columns import pack
from worker_svc.config import UnsupportedOption, WorkerConfig
from worker_svc.moves.transport import UnknownTransport
from worker_svc.parallel.group import Group
from worker_svc.serving.server import WorkerServer
from worker_svc.startup.host_tier import require_movable

PROMPT = make_prompt(37, seed=3)  # two full blocks and five tokens in a third
CONFIG = replace(WORKER_CONFIG, kv_transport=("tcp", "copy"))


@pytest.fixture(scope="module")
def source(llama_folder: Path) -> Iterator[Worker]:
    with serving(CONFIG, llama_folder) as ready:
        yield ready


@pytest.fixture(scope="module")
def receiver(llama_folder: Path) -> Iterator[Worker]:
    with serving(CONFIG, llama_folder) as ready:
        yield ready


def peer_of(worker: Worker, transport: str) -> worker_pb2.PeerKv:
    told = worker.describe().description
    handle = next(one.handle for one in told.transports if one.name == transport)
    return worker_pb2.PeerKv(
        address=worker.address,
        incarnation=told.incarnation,
        transport=transport,
        handle=handle,
    )


def fetch(attachment: Attachment, **fields: object) -> worker_pb2.TransferDone:
    """Sends a fetch of two blocks and returns its answer."""
    defaults: dict[str, object] = {
        "transfer_id": 1,
        "block_ids": pack([8, 7]),
        "source_block_ids": pack([1, 2]),
    }
    message = worker_pb2.FetchBlocks(**(defaults | fields))
    attachment.send_raw(worker_pb2.AttachRequest(fetch=message))
    done: worker_pb2.TransferDone = next(attachment.call).transfer_done
    return done


def test_the_handshake_tells_transports_and_layout(source: Worker, receiver: Worker) -> None:
    one, other = source.describe().description, receiver.describe().description
    assert [each.name for each in one.transports] == ["tcp", "copy"]
    assert len(one.kv_layout_hash) == 32 and one.kv_layout_hash == other.kv_layout_hash


def test_workers_of_other_blocks_have_another_layout(
    source: Worker, worker: Worker, llama_folder: Path
) -> None:
    ours = source.describe().description.kv_layout_hash
    for changed in ({"block_size": 8}, {"kv_cache_dtype": "fp8"}):
        with serving(replace(CONFIG, **changed), llama_folder) as other:  # type: ignore[arg-type]
            assert other.describe().description.kv_layout_hash != ours
    assert not worker.describe().description.kv_layout_hash, "it has no transport"


@pytest.mark.parametrize("transport", ["tcp", "copy"])
def test_a_prompt_goes_on_at_another_worker_as_if_that_had_computed_it(
    source: Worker, receiver: Worker, greedy: Greedy, transport: str
) -> None:
    """With a block that is filled in part, while the source goes on with it."""
    expected = greedy(PROMPT, 8)
    here, there = source.attach(), receiver.attach()
    first = make_sequence(0, PROMPT, [1, 2, 3])
    tokens = here.step(new_sequences=[first], slots=[0], num_scheduled=[37])
    blocks = {"block_ids": pack([8, 7, 6]), "source_block_ids": pack([1, 2, 3])}
    done = fetch(there, peer=peer_of(source, transport), **blocks)
    assert (done.num_blocks, done.problem) == (3, "") and done.num_bytes > 0
    moved = [*PROMPT, *tokens]
    back = make_sequence(1, moved, [8, 7, 6], num_computed_tokens=37, num_prompt_tokens=37)
    tokens += there.step(new_sequences=[back], slots=[1], num_scheduled=[1])
    for _ in range(6):
        tokens += there.step(slots=[1])
    assert tokens == expected
    here.close()
    there.close()


def test_a_source_that_is_another_process_by_now_gives_nothing(
    source: Worker, receiver: Worker
) -> None:
    attachment = receiver.attach()
    peer = peer_of(source, "tcp")
    peer.incarnation -= 1
    done = fetch(attachment, peer=peer)
    assert done.num_blocks == 0 and str(peer.incarnation) in done.problem
    assert fetch(attachment, peer=peer_of(source, "tcp"), transfer_id=2).num_blocks == 2
    cancel = worker_pb2.CancelTransfers(transfer_ids=[1, 2, 3])
    attachment.send_raw(worker_pb2.AttachRequest(cancel_transfers=cancel))
    assert fetch(attachment, peer=peer_of(source, "tcp"), transfer_id=3).num_blocks == 2
    attachment.close()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"transfer_id": 0}, "fetch.transfer_id: must not be 0"),
        ({"block_ids": [0, 1]}, "fetch.block_ids: block 0 is not in 1..63"),
        ({"block_ids": [1, 2**31 - 1]}, "fetch.block_ids: block 2147483647 is not in 1..63"),
        ({"block_ids": [3, 3]}, "fetch.block_ids: a block appears twice"),
        ({"block_ids": []}, "fetch.block_ids: there are none"),
        ({"source_block_ids": [0, 1]}, "fetch.source_block_ids: block 0 is not in 1.."),
        ({"source_block_ids": [1]}, "fetch.block_ids: 2 blocks for 1 fetch.source_block_ids"),
    ],
)
def test_a_fetch_that_cannot_be_made_ends_the_stream_by_its_name(
    source: Worker, receiver: Worker, fields: dict[str, object], problem: str
) -> None:
    attachment = receiver.attach()
    packed = {name: pack(v) if isinstance(v, list) else v for name, v in fields.items()}
    with pytest.raises(grpc.RpcError) as refused:
        fetch(attachment, peer=peer_of(source, "tcp"), **packed)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in refused.value.details()
    attachment.cancel()


def test_a_worker_without_a_transport_refuses_a_fetch(source: Worker, worker: Worker) -> None:
    attachment = worker.attach()
    with pytest.raises(grpc.RpcError) as refused:
        fetch(attachment, peer=peer_of(source, "tcp"))
    assert "fetch.peer: this worker has no transport" in refused.value.details()
    attachment.cancel()


class DividedModel:
    """A model of which this process has a part."""

    state_bytes, states, group = 0, None, Group(size=2)


def test_options_that_cannot_be_served_are_refused_by_name() -> None:
    with pytest.raises(UnknownTransport, match="known are copy, tcp"):
        WorkerServer(WorkerConfig(port=0, kv_transport=("smoke",)), on_failure=lambda: None)
    with pytest.raises(ValueError, match="kv_port: 65536"):
        WorkerConfig(kv_port=65536)
    config = WorkerConfig(kv_transport=("tcp",))
    with pytest.raises(UnsupportedOption) as refused:
        require_movable(config, DividedModel(), 1)  # type: ignore[arg-type]
    assert str(refused.value) == "kv_transport: tcp cannot serve several ranks"
    require_movable(WorkerConfig(), DividedModel(), 1)  # type: ignore[arg-type]
