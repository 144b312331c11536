"""A scheduler whose model has random log probabilities, which follow from the tokens alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gateway.outputs.hypotheses import Hypotheses
from gateway.text.logprobs import RawLogprobs
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc, scheduler_pb2, types_pb2
from wire import columns
from wire.logprobs import LogprobColumns


def likeliest(token_ids: Sequence[int], vocab_size: int, count: int) -> RawLogprobs:
    """The likeliest tokens after these; likely ones recur, so that searches branch."""
    rng = np.random.default_rng([vocab_size, *token_ids[-2:]])
    logits = rng.normal(scale=2.0, size=vocab_size)
    logprobs = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    top = np.argsort(-logprobs, kind="stable")[:count]
    return RawLogprobs(float(logprobs[top[0]]), 1, top.tolist(), logprobs[top].tolist())


def searched(search: Hypotheses, prompt: Sequence[int], vocab_size: int) -> Hypotheses:
    """The search to its end, without a scheduler."""
    while not search.is_over:
        rows = [
            likeliest([*prompt, *beam.token_ids], vocab_size, search.num_candidates)
            for beam in search.running
        ]
        search.advance(rows)
    return search


@dataclass
class RandomModel:
    """Answers the requests of a fake scheduler with one token each, in the order given."""

    scheduler: Any
    disturb: Callable[[Any, Any], bool] = lambda submit, outbox: False  # True: it has answered
    live: set[int] = field(default_factory=set)  # handles of requests that have not ended

    def __post_init__(self) -> None:
        self.scheduler._answer = self.answer

    def answer(self, submit: Any, outbox: Any) -> None:
        self.live.add(submit.handle)
        if not self.disturb(submit, outbox):
            self.tell(submit, outbox)

    def tell(self, submit: Any, outbox: Any) -> None:
        """Sends the token that is sampled next, and the end."""
        token_ids = columns.unpack(submit.prompt_token_ids).tolist()
        vocab_size = self.scheduler.model.vocab_size
        row = likeliest(token_ids, vocab_size, submit.sampling.logprobs)
        table = LogprobColumns(
            np.zeros(1, np.int32),
            np.array([row.logprob], np.float32),
            np.ones(1, np.int32),
            np.array([row.top_token_ids], np.int32),
            np.array([row.top_logprobs], np.float32),
        )
        self.live.discard(submit.handle)
        usage = types_pb2.Usage(prompt_tokens=len(token_ids), completion_tokens=1)
        reason = types_pb2.FINISH_REASON_LENGTH
        ended = scheduler_pb2.Finished(handle=submit.handle, usage=usage, reason=reason)
        outbox.put_nowait(
            scheduler_pb2.SessionResponse(
                handles=columns.pack([submit.handle], columns.UINT32),
                token_ids=columns.pack(row.top_token_ids[:1]),
                logprobs=types_pb2.LogprobColumns(**table.pack()),
                finished=[ended],
            )
        )


async def generate(running: Any, **options: Any) -> pb.GenerateResponse:
    """The answer to a call over gRPC with a prompt of three tokens."""
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    sampling = types_pb2.SamplingParams(max_tokens=9)
    request = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[3, 4, 5])))
    request.options.sampling.CopyFrom(sampling)
    request.options.MergeFrom(pb.GenerationOptions(**options))
    response: pb.GenerateResponse = await stub.Generate(request)
    return response
