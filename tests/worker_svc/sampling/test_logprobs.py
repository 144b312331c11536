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
from worker_svc.sampling.sampler import SamplingRows, sample


def alike(num_rows: int, logprob_rows: list[int], num_top: int) -> SamplingRows:
    rows = SamplingRows.alike(num_rows, temperature=1.0, top_p=1.0)
    positions = np.arange(num_rows)
    wanted = np.array(logprob_rows, dtype=np.int64)
    return replace(rows, output_position=positions, logprob_rows=wanted, num_top=num_top)


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
    )
    attachment = worker.attach()
    attachment.step(new_sequences=[make_sequence(0, [5], [1], sampling=sampling)])
    stub = debug_pb2_grpc.DebugServiceStub(worker.channel)
    described = stub.DescribeRequest(debug_pb2.DescribeRequestRequest(request_id="request-0"))
    attachment.cancel()
    assert described.sampling == (
        "greedy; frequency_penalty 0.5; repetition_penalty 1.25; 2 allowed tokens; 1 bad words; "
        "logprobs 2"
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
