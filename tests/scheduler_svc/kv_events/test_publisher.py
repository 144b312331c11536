"""Events over real sockets: subscribers, gaps, replays, ports in use, and a scheduler."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from scheduler_svc.config import parse
from scheduler_svc.core import KvGroup
from scheduler_svc.core.kv.cache_changes import BlockStored, Cleared
from scheduler_svc.kv_events.options import KvEventOptions
from scheduler_svc.kv_events.publisher import ZmqPublisher
from tests.pace import patience
from tests.ports import free_port
from tests.scheduler_svc.conftest import start_again
from tests.scheduler_svc.core.cache_reader import CacheReader
from tests.scheduler_svc.test_groups import expected, request, run

GROUPS = (KvGroup(2),)
END = b"\xff" * 8


def stored(block_hash: int, parent: int | None = None) -> BlockStored:
    return BlockStored(0, block_hash, parent, np.array([block_hash, 7], dtype=np.int32))


class Router:
    """A subscriber, as a router has one."""

    def __init__(self, port: int, replay_port: int = 0, topic: str = "") -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.sub.connect(f"tcp://127.0.0.1:{port}")
        self.replay_socket = self.context.socket(zmq.REQ)
        if replay_port:
            self.replay_socket.connect(f"tcp://127.0.0.1:{replay_port}")

    def receive(self, timeout_s: float) -> tuple[bytes, int, list[Any]] | None:
        """The next batch: topic, number and payload; None if there is none in time."""
        if not self.sub.poll(1000 * timeout_s):
            return None
        topic, number, payload = self.sub.recv_multipart()
        return topic, int.from_bytes(number), msgpack.unpackb(payload)

    def replayed(self, first: int) -> list[tuple[int, list[Any]]]:
        """The batches that are kept, from a number on."""
        asking = self.context.socket(zmq.DEALER)
        asking.connect(self.replay_socket.getsockopt_string(zmq.LAST_ENDPOINT))
        asking.send_multipart([b"", first.to_bytes(8)])
        found = []
        while asking.poll(1000 * patience(10)):
            empty, number, payload = asking.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b""
                asking.close(linger=0)
                return found
            found.append((int.from_bytes(number), msgpack.unpackb(payload)))
        raise AssertionError("the replay has no end")

    def close(self) -> None:
        for socket in (self.sub, self.replay_socket):
            socket.close(linger=0)
        self.context.term()


@pytest.fixture
def ports() -> tuple[int, int]:
    return free_port(), free_port()


@pytest.fixture
def router(ports: tuple[int, int]) -> Iterator[Router]:
    made = Router(*ports)
    yield made
    made.close()


def options_of(ports: tuple[int, int], **more: Any) -> KvEventOptions:
    endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    return KvEventOptions(True, endpoint=endpoint, replay_endpoint=replay, **more)


def until_heard(publisher: ZmqPublisher, router: Router) -> int:
    """Publishes until the subscriber is connected; the number of the batch that it got."""
    for number in range(100):
        publisher.publish([stored(100 + number), Cleared()])
        if (got := router.receive(0.1)) is not None:
            while (later := router.receive(0.1)) is not None:
                got = later
            return got[1]
    raise AssertionError("nothing arrives")


def test_a_subscriber_gets_batches_and_asks_again_for_those_that_it_missed(
    ports: tuple[int, int],
) -> None:
    publisher = ZmqPublisher(options_of(ports, topic="kv@pod@m"), 3, GROUPS)
    router = Router(ports[0] + 3, ports[1] + 3)
    try:
        last = until_heard(publisher, router)
        router.sub.setsockopt_string(zmq.UNSUBSCRIBE, "")  # it is away for some batches
        publisher.publish([stored(1)])
        publisher.publish([stored(2, 1)])
        missed = router.replayed(last + 1)
        while len(missed) < 2:
            missed = router.replayed(last + 1)
        assert [number for number, _ in missed] == [last + 1, last + 2]
        at_s, (event,), rank = missed[1][1]
        assert (event["type"], event["parent_block_hash"], rank) == ("BlockStored", 1, 3)
        assert at_s > 1.7e9
        router.sub.setsockopt_string(zmq.SUBSCRIBE, "kv@pod")
        for number in range(100):
            publisher.publish([stored(10 + number)])
            if (got := router.receive(0.1)) is not None:
                break
        assert got is not None and got[0] == b"kv@pod@m"
        assert [number for number, _ in router.replayed(0)][:2] == [0, 1]
        assert router.replayed(0)[0][1][1] == [{"type": "AllBlocksCleared"}], "a new beginning"
        assert router.replayed(10**9) == []
    finally:
        publisher.close()
        router.close()


def test_the_end_takes_back_all_that_was_announced(ports: tuple[int, int], router: Router) -> None:
    publisher = ZmqPublisher(options_of(ports), 0, GROUPS)
    last = until_heard(publisher, router)
    publisher.publish([stored(1), stored(2, 1)])
    publisher.close()
    told = []
    while (got := router.receive(patience(1) if len(told) < 2 else 0.1)) is not None:
        told.append(got)
    assert [number for _, number, _ in told] == [last + 1, last + 2]
    removed, cleared = told[1][2][1]
    assert (removed["type"], removed["block_hashes"]) == ("BlockRemoved", [1, 2])
    assert cleared == {"type": "AllBlocksCleared"}


def test_a_full_queue_drops_batches_whose_numbers_are_missing(ports: tuple[int, int]) -> None:
    publisher = ZmqPublisher(options_of(ports, max_queue_size=2), 0, GROUPS)
    router = Router(*ports)
    try:
        last = until_heard(publisher, router)
        publisher._sending.is_awake = True  # its thread is not woken
        for block_hash, parent in ((1, None), (2, 1), (3, 2), (4, None)):
            publisher.publish([stored(block_hash, parent)])
        assert publisher.num_dropped == 2
        publisher._sending.is_awake = False
        publisher._wake()
        while len(told := router.replayed(last + 1)) < 2:
            pass
        numbers = [number for number, _ in told]
        assert numbers[0] == last + 3, "two are missing"
        publisher.publish([stored(5, 4), stored(6)])
        while (told := router.replayed(numbers[-1] + 1)) == []:
            pass
        hashes = [event["block_hashes"] for _, (_, events, _) in told for event in events]
        assert hashes == [[6]], "5 follows one that no reader was told of"
    finally:
        router.close()
        publisher.close()


def test_a_port_in_use_is_taken_when_it_gets_free(
    ports: tuple[int, int], router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    context = zmq.Context()
    other = context.socket(zmq.PUB)
    other.bind(f"tcp://127.0.0.1:{ports[0]}")
    publisher = ZmqPublisher(options_of(ports), 0, GROUPS)
    try:
        publisher.publish([stored(1)])
        assert router.receive(0.3) is None
        other.close(linger=0)
        assert until_heard(publisher, router) > 0
        assert f"cannot be published at tcp://127.0.0.1:{ports[0]} yet: Address" in caplog.text
        assert any(
            event.get("block_hashes") == [1] for _, (_, events, _) in router.replayed(0)
            for event in events
        ), "what waited meanwhile"  # fmt: skip
    finally:
        other.close(linger=0)
        context.term()
        publisher.close()


def test_one_that_is_never_bound_ends_at_once(ports: tuple[int, int]) -> None:
    context = zmq.Context()
    other = context.socket(zmq.PUB)
    other.bind(f"tcp://127.0.0.1:{ports[0]}")
    publisher = ZmqPublisher(options_of(ports), 0, GROUPS)
    publisher.close()
    publisher.thread.join(patience(10))
    assert not publisher.thread.is_alive()
    other.close(linger=0)
    context.term()


def test_questions_that_are_none_are_ignored(ports: tuple[int, int], router: Router) -> None:
    publisher = ZmqPublisher(options_of(ports), 0, GROUPS)
    try:
        until_heard(publisher, router)
        asking = router.context.socket(zmq.DEALER)
        asking.connect(f"tcp://127.0.0.1:{ports[1]}")
        for parts in ([b""], [b"", b"1234567"], [b"x", bytes(8)], [b"", bytes(8), b"more"]):
            asking.send_multipart(parts)
        assert router.replayed(0), "it answers others"
        assert not asking.poll(50)
        asking.close(linger=0)
    finally:
        publisher.close()


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("{", "is no JSON"),
        ("[]", "must be a JSON object"),
        ({"port": 1}, "port is not known: enable_kv_cache_events, publisher"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events must be true or false"),
        ({"hwm": True}, "hwm must be a whole number"),
        ({"hwm": 0}, "hwm must be above 0"),
        ({"publisher": "kafka"}, "publisher is zmq or null"),
        ({"endpoint": "ipc:///tmp/x"}, "endpoint is tcp://HOST:PORT"),
        ({"endpoint": "tcp://*:65536"}, "endpoint is tcp://HOST:PORT"),
        ({"replay_endpoint": "tcp://:5558"}, "replay_endpoint is tcp://HOST:PORT"),
        ({"event_format": "xml"}, "event_format is map or array"),
    ],
)
def test_what_is_no_such_option_is_refused_by_name(
    given: object, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = given if isinstance(given, str) else json.dumps(given)
    with pytest.raises(SystemExit):
        parse(["--worker", "127.0.0.1:1", "--kv-events-config", text])
    assert f"kv_events_config: {problem}" in capsys.readouterr().err


def test_each_group_has_the_next_port_and_nothing_is_published_unasked() -> None:
    def parsed(config: dict[str, object]) -> KvEventOptions | None:
        arguments = ["--worker", "127.0.0.1:1", "--kv-events-config", json.dumps(config)]
        return parse(arguments).kv_events

    found = parsed({"enable_kv_cache_events": True, "replay_endpoint": "tcp://[::1]:6000"})
    assert found is not None
    assert (found.endpoint_of(0), found.endpoint_of(2)) == ("tcp://*:5557", "tcp://*:5559")
    assert found.replay_endpoint_of(1) == "tcp://[::1]:6001"
    assert parsed({}) is parsed({"endpoint": "tcp://*:1"}) is None
    assert parsed({"enable_kv_cache_events": True, "publisher": "null"}) is None


# --- a scheduler ---------------------------------------------------------------------------------


async def test_a_router_knows_the_blocks_of_a_group_also_after_its_worker_is_lost(
    make_cluster: Any, ports: tuple[int, int]
) -> None:
    async with make_cluster(kv_events=options_of(ports)) as cluster:
        router = Router(*ports)
        reader, last = CacheReader(GROUPS), -1

        async def follow() -> bool:
            nonlocal last
            for number, (_, events, rank) in await asyncio.to_thread(router.replayed, last + 1):
                assert (number, rank) == (last + 1, 0)
                reader.read(events)
                last = number
            cached = set(cluster.engine.groups[0].core.internal_state.pool.cache._block_of)
            return bool(cached) and set(reader.known[0]) == cached

        async def until_followed() -> None:
            async with asyncio.timeout(patience(20)):
                while not await follow():
                    await asyncio.sleep(0.02)

        asked = [request(f"r{n}", n, num_prompt=40, max_tokens=30) for n in range(4)]
        answers = await asyncio.gather(*(run(cluster, one) for one in asked))
        assert [tokens for tokens, _ in answers] == [expected(n, 40, 30) for n in range(4)]
        await until_followed()
        before = set(reader.known[0])
        cluster.engine.reset_prefix_cache()
        async with asyncio.timeout(patience(20)):
            while await follow() or reader.known[0]:
                await asyncio.sleep(0.02)
        await run(cluster, request("again", 0, num_prompt=40, max_tokens=30))
        await until_followed()
        assert set(reader.known[0]) < before
        await cluster.worker_server.stop(None)
        async with asyncio.timeout(patience(20)):
            while await follow() or reader.known[0]:
                await asyncio.sleep(0.02)
        server = await start_again(cluster.worker, cluster.worker_port)
        await run(cluster, request("once more", 0, num_prompt=40, max_tokens=30))
        await until_followed()
        await server.stop(None)
        router.close()
