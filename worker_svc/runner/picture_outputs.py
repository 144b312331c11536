"""Encodes pictures between steps, and keeps what the encoder made of them.

Pictures are encoded in the order in which they were asked for. What was encoded is kept by content,
the most recently used first, so that a picture that comes again is not encoded again. What
sequences wait with is kept in any case; while that alone takes all the memory for outputs, no
further picture is encoded. It leaves with its sequences, and since the oldest come first, one
sequence at most waits for others of its own pictures: so the memory must hold those of one.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

from worker_svc.attention.pictures import EncodedPicture
from worker_svc.protocol.pictures import PictureOrder
from worker_svc.protocol.preparations import PreparationOrders

# Of pixels, which are encoded between two steps; a picture that has more takes a turn alone.
MAX_BYTES_PER_TURN = 4 << 20
NO_ENCODER = "this model, as it is served here, reads text only"
Answer = Callable[[int, str], None]


class PictureEncoder(Protocol):
    """The part of a model that encodes pictures."""

    @property
    def sees_both_ways(self) -> bool:
        """True if all tokens of a picture see each other."""

    def problem_with(self, order: PictureOrder) -> str:
        """Why a picture cannot be encoded, for the caller of its request; empty if it can."""

    def encode(self, order: PictureOrder) -> EncodedPicture:
        """Encodes a picture without problems."""


class PictureOutputs:
    """The encoder's outputs of one worker. To be called from the compute thread only."""

    def __init__(self, encoder: PictureEncoder, max_bytes: int) -> None:
        """`max_bytes` are kept, and always those of one sequence."""
        self.encoder = encoder
        self.num_encoded = 0
        self.num_found = 0  # pictures whose output was there
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[PictureOrder, Answer]] = deque()
        self._prepared: dict[int, EncodedPicture] = {}  # by preparation
        self._kept: OrderedDict[bytes, EncodedPicture] = OrderedDict()  # newest last
        self._num_bytes = 0  # of those kept

    @property
    def num_bytes(self) -> int:
        """Bytes of the outputs that are kept, by content."""
        return self._num_bytes

    @property
    def num_waiting(self) -> int:
        """Pictures that are not encoded yet."""
        return len(self._waiting)

    def take_orders(self, orders: PreparationOrders, answer: Answer) -> None:
        """Takes in pictures to encode. `answer` is called with a preparation and its problem."""
        dropped = set(orders.dropped_ids)
        for preparation_id in dropped:
            self._prepared.pop(preparation_id, None)
        if dropped:
            left = (one for one in self._waiting if one[0].preparation_id not in dropped)
            self._waiting = deque(left)
        for order in orders.pictures:
            if problem := order.refusal or self.encoder.problem_with(order):
                answer(order.preparation_id, problem)
            else:
                self._waiting.append((order, answer))

    def encode_some(self) -> bool:
        """Encodes pictures for one turn; True if another turn would encode more.

        Where sequences that wait take all the memory, it is to be called again after a step.
        """
        num_bytes = 0
        while self._waiting:
            order, answer = self._waiting[0]
            assert order.pixels is not None  # else it had a problem
            known = self._kept.get(order.content_id)
            if known is None:
                if self._is_full():
                    return False
                if num_bytes and num_bytes + len(order.pixels.values) > MAX_BYTES_PER_TURN:
                    return True
                num_bytes += len(order.pixels.values)
            self._waiting.popleft()
            answer(order.preparation_id, self._prepare(order, known))
        return False

    def take(self, preparation_id: int) -> EncodedPicture | None:
        """Hands out what a sequence that enters was prepared with; None: there is no such."""
        return self._prepared.pop(preparation_id, None)

    def drop_all(self) -> None:
        """Forgets all preparations: their stream has ended."""
        self._waiting.clear()
        self._prepared.clear()

    def _is_full(self) -> bool:
        """True if preparations alone take the memory for outputs."""
        held = {id(one): one.num_bytes for one in self._prepared.values()}
        return sum(held.values()) >= self._max_bytes

    def _prepare(self, order: PictureOrder, known: EncodedPicture | None) -> str:
        """Prepares a picture; returns its problem."""
        if known is None:
            try:
                known = self.encoder.encode(order)
            except Exception as error:  # whatever the device raises is this picture's alone
                return f"the picture cannot be encoded: {type(error).__name__}"
            self.num_encoded += 1
            self._num_bytes += known.num_bytes
        else:
            self.num_found += 1
        self._kept[order.content_id] = self._prepared[order.preparation_id] = known
        self._kept.move_to_end(order.content_id)
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
        return ""
