"""Forty clients that stream at once, undisturbed or while the workers are disturbed."""

import threading
import time
from collections.abc import Callable

import grpc

from pagewire.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.e2e.conftest import Product
from tests.e2e.history import History, Piece, judge
from tests.pace import patience

NUM_GREEDY = 32
TIMEOUT_S = patience(400.0)
Disturb = Callable[["Streams"], None]


def _request(
    prompt: inference_pb2.Prompt, stop: list[str], **sampling: object
) -> inference_pb2.GenerateStreamRequest:
    params = types_pb2.SamplingParams(**sampling)  # type: ignore[arg-type]
    options = inference_pb2.GenerationOptions(sampling=params, stop=stop)
    return inference_pb2.GenerateStreamRequest(prompt=prompt, options=options)


def requests(max_tokens: int, stop: str = "") -> list[inference_pb2.GenerateStreamRequest]:
    """32 greedy requests, and one for each kind of state that must survive a disturbance.

    The last one ends at `stop`, if that is not empty; without it, it is the one before.
    """
    made = []
    for index in range(NUM_GREEDY):
        # Of the words that the terse model has. By other moduli two tokens may score alike but for
        # rounding, as below; here the best one is 0.0001 ahead of the next, at the least.
        ids = [(index * 7919 + i * 104729) % 2999 + 1000 for i in range(4 + index // 2)]
        prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=ids))
        made.append(_request(prompt, [], temperature=0, max_tokens=max_tokens, ignore_eos=True))
    text = inference_pb2.Prompt(text="One, two, three, four, five, six, seven,")
    # With seed 15 in place of 16 two tokens at position 101 score alike but for rounding: which one
    # wins depends on whether a recovery has computed the cache before it anew.
    kinds: list[dict[str, object]] = [
        {"temperature": 1.0, "seed": 11, "ignore_eos": True},
        {"temperature": 0.8, "seed": 12, "top_p": 0.9, "top_k": 40, "ignore_eos": True},
        {"temperature": 0.9, "seed": 13, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 0.7, "seed": 14, "repetition_penalty": 1.3, "min_tokens": max_tokens // 2},
        {"temperature": 0.0, "logprobs": 2, "ignore_eos": True},
        {"temperature": 1.0, "seed": 16, "logprobs": 0, "ignore_eos": True},
        {"temperature": 0.0},
    ]
    made += [_request(text, [], max_tokens=max_tokens, **kind) for kind in kinds]
    stops = [stop] if stop else []
    made.append(_request(text, stops, max_tokens=max_tokens, temperature=0, ignore_eos=True))
    return made


class Streams:
    """One run of all requests."""

    def __init__(self, product: Product, max_tokens: int, stop: str = "") -> None:
        self.product = product
        asked = requests(max_tokens, stop)
        self.histories = [History() for _ in asked]
        self.num_tokens = 0  # that all clients have received
        self._num_running = len(asked)
        self._changed = threading.Condition()  # of both counts
        self._threads = [
            threading.Thread(target=self._follow, args=pair)
            for pair in zip(asked, self.histories, strict=True)
        ]

    @property
    def are_over(self) -> bool:
        return not self._num_running

    def wait_for_tokens(self, count: int) -> bool:
        """Waits for `count` more tokens; False if all requests ended before."""
        wanted = self.num_tokens + count
        with self._changed:
            has_ended = self._changed.wait_for(
                lambda: self.num_tokens >= wanted or self.are_over, TIMEOUT_S
            )
        assert has_ended, self.product.log_of("scheduler_svc")
        return self.num_tokens >= wanted

    def wait_until_all_go_on(self) -> bool:
        """Waits until each request has had a further token, or its end; False if all have ended."""
        before = [len(history.pieces) for history in self.histories]
        pairs = list(zip(self.histories, before, strict=True))
        with self._changed:
            have_gone_on = self._changed.wait_for(
                lambda: all(_has_gone_on(*pair) for pair in pairs), TIMEOUT_S
            )
        assert have_gone_on, self.product.log_of("scheduler_svc")
        return not self.are_over

    def wait_until_all_are_accepted(self) -> None:
        """Waits until the scheduler has, or has had, every request.

        One that comes while there is no scheduler is refused at once, and was never taken on.
        """
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            num_ended = len(self.histories) - self._num_running  # first: one may end meanwhile
            status = self.product.status()
            num_there = int(status.get("num_running", 0)) + int(status.get("num_waiting", 0))
            if num_ended + num_there >= len(self.histories):
                return
            assert time.monotonic() < deadline_s, status
            time.sleep(0.02)

    def run(self, disturb: Disturb | None = None) -> list[History]:
        """The histories of all clients."""
        for thread in self._threads:
            thread.start()
        if disturb is not None:
            disturb(self)
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        return self.histories

    def _follow(self, request: inference_pb2.GenerateStreamRequest, history: History) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{self.product.grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            try:
                for message in stub.GenerateStream(request, timeout=TIMEOUT_S):
                    history.pieces.append(_piece(message.delta))
                    self._count(len(message.delta.token_ids))
            except grpc.RpcError as error:
                history.error = f"{error.code().name}: {error.details()}"
            finally:
                self._count(0, num_ended=1)

    def _count(self, num_tokens: int, num_ended: int = 0) -> None:
        with self._changed:
            self.num_tokens += num_tokens
            self._num_running -= num_ended
            self._changed.notify_all()


def _has_gone_on(history: History, num_pieces: int) -> bool:
    has_ended = bool(history.error or (history.pieces and history.pieces[-1].finish_reason))
    return has_ended or len(history.pieces) > num_pieces


def _piece(delta: inference_pb2.OutputDelta) -> Piece:
    return Piece(
        token_ids=tuple(delta.token_ids),
        text=delta.text,
        logprobs=tuple(entry.logprob for entry in delta.logprobs),
        finish_reason=delta.finish_reason,
        completion_tokens=delta.usage.completion_tokens if delta.HasField("usage") else None,
        stop_string=delta.stop_string,
    )


def assert_unnoticed(seen: list[History], calm: list[History]) -> None:
    """Asserts that the two runs are equal and the undisturbed one is complete."""
    assert all(not history.error and len(history.ends) == 1 for history in calm)
    verdicts = {
        number: faults
        for number, (one, other) in enumerate(zip(seen, calm, strict=True))
        if (faults := judge(one, other))
    }
    assert not verdicts, verdicts
