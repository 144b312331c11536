"""Log probabilities of sampled tokens are the model's, before processors and filters."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from pagewire.v1 import debug_pb2, debug_pb2_grpc, types_pb2, worker_pb2
from tests.worker_svc.conftest import VOCAB_SIZE, Worker, make_prompt, make_sequence
from wire.logprobs import LogprobColumns
from worker_svc.protocol.step import RowSampling
from worker_svc.sampling.logprobs import Wanted
from worker_svc.sampling.sampler import SamplingRows, sample


def asking(num_rows: int, wanted: Wanted) -> SamplingRows:
    rows = SamplingRows.alike(num_rows, temperature=1.0, top_p=1.0)
    return replace(rows, output_position=np.arange(num_rows), wanted=wanted)


def alike(num_rows: int, logprob_rows: list[int], num_top: int) -> SamplingRows:
    return asking(num_rows, Wanted(np.array(logprob_rows, dtype=np.int64), num_top))


def test_ranks_count_the_tokens_that_are_at_least_as_likely() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0]]).repeat(200, 1)
    sampled = sample(logits, alike(200, list(range(200)), 4))
    assert sampled.logprobs is not None
    rank_of = dict(zip(sampled.token_ids.tolist(), sampled.logprobs.ranks.tolist(), strict=True))
    assert rank_of == {0: 1, 1: 4, 2: 3, 3: 3}


def test_only_rows_that_ask_are_looked_up() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    before = logits.double().log_softmax(-1)
    sampled = sample(logits, alike(5, [1, 4], 3))
    assert sampled.logprobs is not None
    columns = sampled.logprobs.to_host()
    assert columns.rows.tolist() == [1, 4]
    for row, token_id, logprob in zip(
        (1, 4), sampled.token_ids[[1, 4]].tolist(), columns.logprobs, strict=True
    ):
        assert logprob == pytest.approx(before[row, token_id].item(), abs=1e-5)
    assert columns.top_token_ids.tolist() == before[[1, 4]].topk(3).indices.tolist()
    assert sample(logits, alike(5, [], 0)).logprobs is None


@pytest.mark.parametrize("num_top", [0, 2, 6])
def test_named_tokens_take_the_place_of_the_likeliest(num_top: int) -> None:
    """In their rows alone, in the order in which they are named, and as often."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    before = logits.double().log_softmax(-1)
    named = {0: (), 2: (49, 0, 7, 0), 3: (7,)}
    samplings = [
        RowSampling(num_top_logprobs=num_top, logprob_token_ids=ids) for ids in named.values()
    ]
    wanted = Wanted.of(np.array(list(named)), samplings)
    found = sample(logits, asking(4, wanted)).logprobs
    assert found is not None
    columns = found.to_host()
    assert columns.top_token_ids.shape == (3, max(num_top, 4))
    for place, (row, ids) in enumerate(named.items()):
        expected = list(ids) or before[row].topk(num_top).indices.tolist()
        assert columns.top_token_ids[place, : len(expected)].tolist() == expected
        values = before[row, expected].tolist()
        assert columns.top_logprobs[place, : len(expected)].tolist() == pytest.approx(values)


@torch.inference_mode()
def test_they_equal_transformers_whatever_the_sampling(worker: Worker, llama_folder: Path) -> None:
    """Twelve tokens with every kind of logits processor at once; temperature 1.5."""
    prompt = make_prompt(20)
    sampling = worker_pb2.RowSampling(
        temperature=1.5,
        top_p=0.9,
        seed=3,
        presence_penalty=1.0,
        repetition_penalty=1.2,
        logit_bias=[types_pb2.LogitBias(token_id=9, bias=3.0)],
        bad_words_token_ids=[types_pb2.TokenSequence(token_ids=[11])],
        logprobs=7,
    )
    attachment = worker.attach()
    sequence = make_sequence(0, prompt, [1, 2, 3], sampling=sampling)
    outputs = []
    for step in range(12):
        entry = {"new_sequences": [sequence], "num_scheduled": [20]} if step == 0 else {}
        attachment.send(slots=[0], **entry)
        outputs.append(attachment.receive())
    attachment.cancel()
    token_ids = list(prompt)
    model = LlamaForCausalLM.from_pretrained(llama_folder, dtype=torch.float32).eval()
    for output in outputs:
        assert output.error == ""
        columns = LogprobColumns.unpack(output.logprobs, 1)
        assert columns is not None
        token_id = int.from_bytes(output.token_ids, "little")
        expected = model(torch.tensor([token_ids])).logits[0, -1].log_softmax(-1)
        assert columns.logprobs[0] == pytest.approx(expected[token_id].item(), abs=1e-4)
        assert columns.ranks[0] == int((expected >= expected[token_id]).sum())
        assert columns.top_token_ids[0].tolist() == expected.topk(7).indices.tolist()
        assert columns.top_logprobs[0] == pytest.approx(expected.topk(7).values.numpy(), abs=1e-4)
        token_ids.append(token_id)
    assert 11 not in token_ids[20:]


@torch.inference_mode()
def test_named_tokens_have_the_values_of_transformers(worker: Worker, llama_folder: Path) -> None:
    """Next to a row that asks for the likeliest, of a token that a bias forbids to be sampled."""
    prompt, named = make_prompt(12), [9, 3, VOCAB_SIZE - 1]
    forbids = [types_pb2.LogitBias(token_id=9, bias=-100.0)]
    sampling = worker_pb2.RowSampling(
        top_p=1, logit_bias=forbids, logprobs=0, logprob_token_ids=named
    )
    likeliest = worker_pb2.RowSampling(top_p=1, logprobs=5)
    attachment = worker.attach()
    attachment.send(
        new_sequences=[
            make_sequence(0, prompt, [1, 2], sampling=sampling),
            make_sequence(1, prompt, [3, 4], sampling=likeliest),
        ],
        slots=[0, 1],
        num_scheduled=[12, 12],
    )
    columns = LogprobColumns.unpack(attachment.receive().logprobs, 2)
    attachment.cancel()
    model = LlamaForCausalLM.from_pretrained(llama_folder, dtype=torch.float32).eval()
    expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert columns is not None
    assert columns.top_token_ids[0, :3].tolist() == named
    assert columns.top_logprobs[0, :3] == pytest.approx(expected[named].numpy(), abs=1e-4)
    assert columns.top_token_ids[1].tolist() == expected.topk(5).indices.tolist()


def test_a_row_that_names_a_token_outside_the_vocabulary_is_refused(worker: Worker) -> None:
    sampling = worker_pb2.RowSampling(top_p=1, logprobs=0, logprob_token_ids=[VOCAB_SIZE])
    attachment = worker.attach()
    sequence = make_sequence(0, make_prompt(5), [1], sampling=sampling)
    attachment.send(new_sequences=[sequence], slots=[0], num_scheduled=[5])
    (error,) = attachment.receive().row_errors
    assert "logprob_token_ids" in error.message


def test_rows_that_ask_for_none_get_none_beside_rows_that_do(worker: Worker) -> None:
    attachment = worker.attach()
    asks = worker_pb2.RowSampling(top_p=1, logprobs=0)
    attachment.send(
        new_sequences=[
            make_sequence(0, make_prompt(5), [1]),
            make_sequence(1, make_prompt(6), [2], sampling=asks),
        ],
        slots=[0, 1],
        num_scheduled=[5, 6],
    )
    columns = LogprobColumns.unpack(attachment.receive().logprobs, 2)
    attachment.send(freed_slots=[1], slots=[0])
    assert not attachment.receive().HasField("logprobs")
    attachment.cancel()
    assert columns is not None
    assert columns.rows.tolist() == [1]
    assert columns.top_token_ids.shape == (1, 0)
    assert columns.ranks[0] == 1  # greedy


def test_the_debug_view_names_rules_and_counts_their_tokens(worker: Worker) -> None:
    sampling = worker_pb2.RowSampling(
        top_p=1,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
        allowed_token_ids=[99, 98],
        bad_words_token_ids=[types_pb2.TokenSequence(token_ids=[98])],
        logprobs=2,
        logprob_token_ids=[5, 6, 7],
    )
    attachment = worker.attach()
    attachment.step(new_sequences=[make_sequence(0, [5], [1], sampling=sampling)])
    stub = debug_pb2_grpc.DebugServiceStub(worker.channel)
    described = stub.DescribeRequest(debug_pb2.DescribeRequestRequest(request_id="request-0"))
    attachment.cancel()
    assert described.sampling == (
        "greedy; frequency_penalty 0.5; repetition_penalty 1.25; 2 allowed tokens; 1 bad words; "
        "3 tokens with log probabilities; logprobs 2"
    )


def continue_to(worker: Worker, num_others: int, cut_at: int | None) -> list[int]:
    """Twenty tokens at temperature 1 among other requests, optionally resumed midway."""
    sampling = worker_pb2.RowSampling(
        temperature=1, top_p=1, seed=42, frequency_penalty=0.5, repetition_penalty=1.1
    )
    other = worker_pb2.RowSampling(temperature=0.5, top_p=0.8, top_k=9, presence_penalty=1)
    token_ids, prompt = make_prompt(10, seed=1), 10
    attachment = worker.attach()
    for step in range(20):
        enters = step == 0 or step == cut_at
        new = [make_sequence(3, token_ids, [1, 2], sampling=sampling, num_prompt_tokens=prompt)]
        others = range(num_others if step == 0 else 0)
        new = new * enters + [
            make_sequence(i, make_prompt(4, i), [3 + 2 * i, 4 + 2 * i], sampling=other)
            for i in others
        ]
        slots = [*range(num_others), 3]
        counts = [4 if step == 0 else 1] * num_others + [len(token_ids) if enters else 1]
        sampled = attachment.step(
            freed_slots=[3] if step == cut_at else [],
            new_sequences=new,
            slots=slots,
            num_scheduled=counts,
        )
        token_ids.append(sampled[-1])
    attachment.cancel()
    return token_ids[prompt:]


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_a_preemption(
    worker: Worker,
) -> None:
    alone = continue_to(worker, 0, None)
    assert len(set(alone)) > 5 and max(alone) < VOCAB_SIZE
    assert continue_to(worker, 3, None) == alone
    assert continue_to(worker, 3, 11) == alone
