"""Decoding of steps and encoding of outputs: every field, and every refused frame."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.v1 import types_pb2, worker_pb2
from wire.columns import UINT8, pack, unpack
from worker_svc.protocol.codec import decode_hello, decode_step, encode_output
from worker_svc.protocol.step import BadStep, Limits, RowSampling, StepOutput, StepTimings

LIMITS = Limits(
    num_blocks=50,
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=100,
    max_model_len=64,
    vocab_size=1000,
)


def frame(**fields: object) -> bytes:
    step = worker_pb2.SchedulerOutput(**fields)
    return worker_pb2.AttachRequest(step=step).SerializeToString()


SAMPLING = worker_pb2.RowSampling(
    temperature=0.5,
    top_p=0.75,
    top_k=40,
    min_p=0.125,
    seed=(1 << 64) - 1,
    min_tokens=3,
    stop_token_ids=[9, 2, 9],
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    repetition_penalty=1.5,
    logit_bias=[types_pb2.LogitBias(token_id=8, bias=-2.5)],
    allowed_token_ids=[4, 3, 4],
    bad_words_token_ids=[types_pb2.TokenSequence(token_ids=[5, 6])],
    logprobs=0,
)


def test_every_field_of_a_step_arrives() -> None:
    sequence = worker_pb2.NewSequence(
        slot=5,
        request_id="a",
        token_ids=pack([7, 8, 999]),
        num_prompt_tokens=2,
        num_computed_tokens=1,
        block_ids=pack([49, 1]),
        sampling=SAMPLING,
    )
    step = decode_step(
        frame(
            step_id=12,
            ack_step_id=10,
            reset=True,
            freed_slots=pack([3, 1]),
            new_sequences=[sequence],
            appended_slots=pack([5, 5]),
            appended_block_ids=pack([7, 6]),
            slots=pack([5, 0]),
            num_scheduled=pack([2, 1]),
        ),
        LIMITS,
    )
    assert (step.step_id, step.ack_step_id, step.reset, step.same_rows) == (12, 10, True, False)
    assert step.freed_slots.tolist() == [3, 1]
    assert (step.appended_slots.tolist(), step.appended_block_ids.tolist()) == ([5, 5], [7, 6])
    assert (step.slots.tolist(), step.num_scheduled.tolist()) == ([5, 0], [2, 1])
    new = step.new_sequences[0]
    assert (new.slot, new.request_id, new.num_prompt_tokens, new.num_computed_tokens) == (
        5,
        "a",
        2,
        1,
    )
    assert (new.token_ids.tolist(), new.block_ids.tolist()) == ([7, 8, 999], [49, 1])
    assert new.sampling == RowSampling(
        *(0.5, 0.75, 40, 0.125, (1 << 64) - 1, 3, (9, 2)),
        *(0.5, -0.25, 1.5, ((8, -2.5),), (4, 3), ((5, 6),), 0),
    )


def test_no_counts_mean_one_token_each() -> None:
    assert decode_step(frame(slots=pack([4, 2, 6])), LIMITS).num_scheduled.tolist() == [1, 1, 1]


def test_a_top_k_of_the_whole_vocabulary_is_off() -> None:
    sequence = worker_pb2.NewSequence(
        token_ids=pack([1]),
        num_prompt_tokens=1,
        sampling=worker_pb2.RowSampling(top_p=1, top_k=1000),
    )
    step = decode_step(frame(new_sequences=[sequence]), LIMITS)
    assert step.new_sequences[0].sampling.top_k == 0


def test_every_field_of_an_output_is_sent() -> None:
    output = StepOutput(
        step_id=3,
        token_ids=np.array([5, 70000], dtype=np.int32),
        row_status=np.array([0, 1], dtype=np.uint8),
        timings=StepTimings(1, 2, 3, 4, 5),
    )
    message = worker_pb2.AttachResponse.FromString(encode_output(output)).output
    assert unpack(message.token_ids).tolist() == [5, 70000]
    assert unpack(message.row_status, UINT8).tolist() == [0, 1]
    timings = message.timings
    assert (timings.queue_us, timings.prepare_us, timings.forward_us) == (1, 2, 3)
    assert (timings.sample_us, timings.copy_us) == (4, 5)
    quiet = StepOutput(4, np.zeros(0, dtype=np.int32), error="out of memory")
    message = worker_pb2.AttachResponse.FromString(encode_output(quiet)).output
    assert (message.step_id, message.token_ids, message.row_status) == (4, b"", b"")
    assert message.error == "out of memory"


def test_hello_must_come_first_and_only_first() -> None:
    hello = worker_pb2.Hello(protocol_version=1, epoch=9, first_step_id=4)
    bytes_ = worker_pb2.AttachRequest(hello=hello).SerializeToString()
    decoded = decode_hello(bytes_)
    assert (decoded.protocol_version, decoded.epoch, decoded.first_step_id) == (1, 9, 4)
    with pytest.raises(BadStep, match="frame"):
        decode_step(bytes_, LIMITS)
    with pytest.raises(BadStep, match="frame"):
        decode_hello(frame())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("logit_bias", [types_pb2.LogitBias(token_id=1000)]),
        ("logit_bias", [types_pb2.LogitBias(token_id=1, bias=math.nan)]),
        ("logit_bias", [types_pb2.LogitBias(token_id=1)] * 2),
        ("allowed_token_ids", [1000]),
        ("bad_words_token_ids", [types_pb2.TokenSequence()]),
        ("bad_words_token_ids", [types_pb2.TokenSequence(token_ids=[1, 1000])]),
    ],
)
def test_a_rule_out_of_range_is_named(field: str, value: object) -> None:
    sampling = worker_pb2.RowSampling(top_p=1, **{field: value})
    sequence = worker_pb2.NewSequence(
        token_ids=pack([1]), num_prompt_tokens=1, block_ids=pack([1]), sampling=sampling
    )
    refused = decode_step(frame(new_sequences=[sequence]), LIMITS).new_sequences[0].sampling
    assert refused.refusal.startswith(f"sampling.{field}: ")
    assert replace(refused, refusal="") == RowSampling(), "it computes as if it asked for nothing"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_give_a_step_or_a_bad_step(garbage: bytes) -> None:
    try:
        decode_step(garbage, LIMITS)
    except BadStep:
        return


INTS = st.lists(st.one_of(st.integers(-2, 12), st.integers(-(1 << 31), (1 << 31) - 1)), max_size=5)


@settings(max_examples=300, deadline=None)
@given(
    freed=INTS,
    appended=INTS,
    blocks=INTS,
    slots=INTS,
    counts=INTS,
    same_rows=st.booleans(),
    tail=st.binary(max_size=3),
)
def test_a_step_that_passes_is_within_every_limit(
    freed: list[int],
    appended: list[int],
    blocks: list[int],
    slots: list[int],
    counts: list[int],
    same_rows: bool,
    tail: bytes,
) -> None:
    try:
        step = decode_step(
            frame(
                freed_slots=pack(freed) + tail,
                appended_slots=pack(appended),
                appended_block_ids=pack(blocks),
                slots=pack(slots),
                num_scheduled=pack(counts),
                same_rows=same_rows,
            ),
            LIMITS,
        )
    except BadStep:
        return
    assert not tail
    for named in (step.freed_slots, step.appended_slots, step.slots):
        assert all(0 <= slot < 8 for slot in named)
    assert len(set(slots)) == len(slots) and len(set(freed)) == len(freed)
    assert all(1 <= block < 50 for block in step.appended_block_ids)
    assert len(step.appended_slots) == len(step.appended_block_ids)
    assert all(count >= 1 for count in step.num_scheduled)
    assert step.num_scheduled.sum() <= 100
    assert len(step.num_scheduled) == len(step.slots)
    assert not (same_rows and slots)
