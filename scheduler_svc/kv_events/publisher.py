"""Publishes the events of one worker group over ZMQ, from a thread of its own.

    PUB     topic, number (8 bytes, big-endian, from 0), payload
    ROUTER  asked [empty, first number], answers [empty, number, payload] for each batch that is
            kept, then [empty, ff x 8, empty payload]

A payload is msgpack: [seconds since 1970, [event, ...], rank of the group]. The event loop adds
changes to a queue and never waits; with a full queue a batch is dropped, and its number missing.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgpack
import zmq

from scheduler_svc.core import KvGroup
from scheduler_svc.core.kv.cache_changes import Change
from scheduler_svc.kv_events.batch import Announced, Event, as_array
from scheduler_svc.kv_events.options import KvEventOptions

_END = b"\xff" * 8
_RETRY_MS = 1_000  # between attempts to bind
_LAST_WORDS_MS = 500  # for what is under way when it ends
_WAKE = "inproc://wake"

log = logging.getLogger("scheduler.kv_events")


class ZmqPublisher:
    """Its methods belong to the event loop; what its thread does is in `_Sending`."""

    def __init__(self, options: KvEventOptions, rank: int, groups: Sequence[KvGroup]) -> None:
        self.num_dropped = 0  # batches
        self._most = options.max_queue_size
        self._sending = _Sending(options, rank, Announced(groups))
        self._waking = self._sending.context.socket(zmq.PAIR)
        self._waking.connect(_WAKE)
        self.thread = threading.Thread(target=self._sending.run, name=f"kv-events-{rank}")
        self.thread.start()

    def publish(self, changes: list[Change]) -> None:
        """Has these changes published, or drops them if too many batches wait."""
        sending = self._sending
        if len(sending.queue) >= self._most:
            self.num_dropped += 1
            sending.num_dropped += 1
            return
        sending.queue.append((time.time(), changes))
        self._wake()

    def close(self) -> None:
        """Has readers told that all blocks are gone, and the thread end; does not wait for it."""
        self._sending.is_closing = True
        self._wake()
        self._waking.close()

    def _wake(self) -> None:
        if not self._sending.is_awake:
            self._sending.is_awake = True
            with contextlib.suppress(zmq.Again):  # after an error the thread is gone
                self._waking.send(b"", zmq.NOBLOCK)


class _Sending:
    """The thread's side: sockets, what readers know, and the batches kept for them."""

    def __init__(self, options: KvEventOptions, rank: int, announced: Announced) -> None:
        self.context = zmq.Context()
        self.queue: deque[tuple[float, list[Change]]] = deque()
        self.num_dropped = 0  # batches, of which readers were not told
        self.is_awake = self.is_closing = False
        self._options, self._rank, self._announced = options, rank, announced
        self._number = 0  # of the next batch
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=options.buffer_steps)
        self._woken = self.context.socket(zmq.PAIR)
        self._woken.bind(_WAKE)
        self._out = self.context.socket(zmq.PUB)
        self._out.setsockopt(zmq.SNDHWM, options.hwm)
        self._replay = self.context.socket(zmq.ROUTER)
        # All that is kept has room, once; one who asks again without reading gets no more.
        self._replay.setsockopt(zmq.SNDHWM, options.buffer_steps + 2)
        self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)

    def run(self) -> None:
        """Publishes until closed."""
        try:
            if self._is_bound():
                self._send(self._announced.clear(), time.time())
                self._serve()
        except Exception:
            log.exception("KV events of group %d are not published any more", self._rank)
        finally:
            for socket in (self._woken, self._replay):
                socket.close(linger=0)
            self._out.close(linger=_LAST_WORDS_MS)
            self.context.term()  # waits for the last words, and for `ZmqPublisher.close`

    def _is_bound(self) -> bool:
        """Binds, again and again while another process has the ports; False if closed meanwhile."""
        endpoints = [(self._out, self._options.endpoint_of(self._rank))]
        if (replay := self._options.replay_endpoint_of(self._rank)) is not None:
            endpoints.append((self._replay, replay))
        for socket, endpoint in endpoints:
            why = ""
            while not self.is_closing:
                try:
                    socket.bind(endpoint)
                    break
                except zmq.ZMQError as error:
                    if str(error) != why:
                        why = str(error)
                        log.error("KV events cannot be published at %s yet: %s", endpoint, why)
                    self._woken.poll(_RETRY_MS)
        return not self.is_closing

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._replay in ready:
                self._answer(self._replay.recv_multipart())
            if self._woken in ready:
                self._woken.recv()
                self.is_awake = False  # first: what comes from here on wakes again
                self._publish_waiting()
                if self.is_closing:
                    return self._send(self._announced.clear(), time.time())

    def _publish_waiting(self) -> None:
        while self.queue:
            at_s, changes = self.queue.popleft()
            if self.num_dropped:  # what followed is not known: readers begin anew
                self._number += self.num_dropped
                self.num_dropped = 0
                self._send(self._announced.clear(), at_s)
                self._announced.has_gaps = True
            if events := self._announced.events(changes):
                self._send(events, at_s)

    def _send(self, events: list[Event], at_s: float) -> None:
        told = [as_array(event) for event in events] if self._is_array else events
        payload = msgpack.packb([at_s, told, self._rank])
        number, self._number = self._number, self._number + 1
        self._kept.append((number, payload))
        self._out.send_multipart([self._options.topic.encode(), number.to_bytes(8), payload])

    @property
    def _is_array(self) -> bool:
        return self._options.event_format == "array"

    def _answer(self, asked: list[bytes]) -> None:
        """Sends what is kept from a number on; ignores what is no such question."""
        if len(asked) != 3 or asked[1] or len(asked[2]) != 8:
            return
        to, first = asked[0], int.from_bytes(asked[2])
        try:
            for number, payload in self._kept:
                if number >= first:
                    parts = [to, b"", number.to_bytes(8), payload]
                    self._replay.send_multipart(parts, zmq.NOBLOCK)
            self._replay.send_multipart([to, b"", _END, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it is gone, or reads nothing
            log.warning("a reader of KV events did not get its replay: %s", error)
