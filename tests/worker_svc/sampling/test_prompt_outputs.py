"""Prompt outputs against transformers on the same weights."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from pagewire.v1 import debug_pb2, debug_pb2_grpc, types_pb2, worker_pb2
from tests.worker_svc.conftest import VOCAB_SIZE, Attachment, Worker, make_prompt, make_sequence
from wire.prompt_outputs import HiddenMean, PromptOutput
from worker_svc.sampling import prompt_outputs

Logits = Callable[[list[int]], tuple[torch.Tensor, torch.Tensor]]
MEAN = worker_pb2.RowSampling(top_p=1, pooling=types_pb2.POOLING_MEAN)


def scoring(num_top: int) -> worker_pb2.RowSampling:
    return worker_pb2.RowSampling(top_p=1, prompt_logprobs=num_top)


@pytest.fixture(scope="module")
def theirs(llama_folder: Path) -> Logits:
    """Log probabilities [T, V] and final hidden states [T, hidden] of a prompt."""
    model = LlamaForCausalLM.from_pretrained(llama_folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        found = model(torch.tensor([prompt]), output_hidden_states=True)
        return found.logits[0].log_softmax(-1), found.hidden_states[-1][0]

    return run


def prompt_outputs_of(attachment: Attachment) -> list[PromptOutput]:
    output = attachment.receive()
    assert output.error == ""
    return [PromptOutput.unpack(prompt_output) for prompt_output in output.prompt_outputs]


def check_scores(received: list[PromptOutput], prompt: list[int], theirs: Logits, k: int) -> None:
    """Asserts equal values, ranks and top tokens, for all positions in order."""
    expected, _ = theirs(prompt)
    at = 0
    for prompt_output in received:
        assert prompt_output.begin == at and prompt_output.logprobs is not None
        at = prompt_output.end
        rows = expected[prompt_output.begin : prompt_output.end]
        token_ids = torch.tensor(prompt[prompt_output.begin + 1 : prompt_output.end + 1])
        chosen = rows.gather(1, token_ids[:, None])
        columns = prompt_output.logprobs
        assert columns.logprobs == pytest.approx(chosen[:, 0].numpy(), abs=1e-4)
        assert columns.ranks.tolist() == (rows >= chosen).sum(-1).tolist()
        assert columns.top_token_ids.tolist() == rows.topk(k).indices.tolist()
        assert columns.top_logprobs == pytest.approx(rows.topk(k).values.numpy(), abs=1e-4)
    assert at == len(prompt) - 1


@pytest.mark.parametrize("chunks", [[70], [1, 69], [33, 36, 1], [64, 5, 1]])
def test_scores_equal_transformers_however_the_prompt_is_cut(
    worker: Worker, theirs: Logits, chunks: list[int]
) -> None:
    prompt = make_prompt(70)
    attachment = worker.attach()
    received = []
    for step, chunk in enumerate(chunks):
        new = [make_sequence(0, prompt, [1, 2, 3, 4, 5], sampling=scoring(5))] * (step == 0)
        attachment.send(new_sequences=new, slots=[0], num_scheduled=[chunk])
        received += prompt_outputs_of(attachment)
    attachment.send(slots=[0])  # a decode step
    assert prompt_outputs_of(attachment) == []
    attachment.cancel()
    check_scores(received, prompt, theirs, k=5)


def test_logits_of_a_long_prompt_are_made_a_few_rows_at_a_time(
    worker: Worker, theirs: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    most_bytes = 4 * 7 * VOCAB_SIZE
    monkeypatch.setattr(prompt_outputs, "MAX_LOGITS_BYTES", most_bytes)
    sizes, look_up = [], prompt_outputs.look_up

    def spy(logprobs: torch.Tensor, *rest: object) -> object:
        sizes.append(logprobs.nbytes)
        return look_up(logprobs, *rest)

    monkeypatch.setattr(prompt_outputs, "look_up", spy)
    prompt = make_prompt(70)
    attachment = worker.attach()
    new = [make_sequence(0, prompt, [1, 2, 3, 4, 5], sampling=scoring(3))]
    attachment.send(new_sequences=new, slots=[0], num_scheduled=[70])
    received = prompt_outputs_of(attachment)
    attachment.cancel()
    assert max(sizes) == most_bytes and len(sizes) == 10
    check_scores(received, prompt, theirs, k=3)


@pytest.mark.parametrize("chunks", [[70], [1, 69], [33, 36, 1]])
def test_hidden_states_equal_transformers_however_the_prompt_is_cut(
    worker: Worker, theirs: Logits, chunks: list[int]
) -> None:
    prompt = make_prompt(70, seed=1)
    _, expected = theirs(prompt)
    blocks = [1, 2, 3, 4, 5]
    for begin, states in ((0, expected), (69, expected[69:])):
        attachment = worker.attach()
        mean = HiddenMean()
        for step, chunk in enumerate(chunks):
            entering = {"sampling": MEAN, "prompt_only": True, "prompt_output_begin": begin}
            new = [make_sequence(0, prompt, blocks, **entering)] * (step == 0)
            attachment.send(new_sequences=new, slots=[0], num_scheduled=[chunk])
            for prompt_output in prompt_outputs_of(attachment):
                mean.add(prompt_output)
        attachment.cancel()
        found = mean.value()
        assert found is not None
        assert found == pytest.approx(states.double().mean(0).numpy(), abs=1e-4)


def test_questions_of_all_kinds_share_a_step_with_decodes(worker: Worker, theirs: Logits) -> None:
    prompts = [make_prompt(n, seed=n) for n in (9, 12, 17, 5)]
    attachment = worker.attach()
    attachment.step(new_sequences=[make_sequence(0, prompts[0], [1])], slots=[0], num_scheduled=[9])
    hidden = {"sampling": MEAN, "prompt_only": True}
    attachment.send(
        new_sequences=[
            make_sequence(1, prompts[1], [2], sampling=scoring(0)),
            make_sequence(2, prompts[2], [3, 4], **hidden),
            make_sequence(3, prompts[3], [5], sampling=scoring(2), prompt_only=True),
        ],
        slots=[0, 3, 2, 1],
        num_scheduled=[1, 5, 17, 12],
    )
    output = attachment.receive()
    attachment.cancel()
    assert output.error == "" and len(output.token_ids) == 8  # of slots 0 and 1
    scored_only, pooled, scored = map(PromptOutput.unpack, output.prompt_outputs)
    assert [scored_only.owner, pooled.owner, scored.owner] == [3, 2, 1]
    check_scores([scored_only], prompts[3], theirs, k=2)
    check_scores([scored], prompts[1], theirs, k=0)
    _, states = theirs(prompts[2])
    assert pooled.hidden_sum == pytest.approx(states.sum(0).numpy(), abs=1e-3)


def test_a_sequence_that_enters_again_reports_from_where_it_was(
    worker: Worker, theirs: Logits
) -> None:
    prompt = make_prompt(40, seed=3)
    attachment = worker.attach()
    entering = make_sequence(0, prompt, [1, 2, 3], sampling=scoring(1))
    attachment.send(new_sequences=[entering], slots=[0], num_scheduled=[21])
    received = prompt_outputs_of(attachment)
    again = make_sequence(
        1, prompt, [1, 4, 5], sampling=scoring(1), num_computed_tokens=16, prompt_output_begin=21
    )
    attachment.send(freed_slots=[0], new_sequences=[again], slots=[1], num_scheduled=[24])
    received += prompt_outputs_of(attachment)
    attachment.cancel()
    check_scores(received, prompt, theirs, k=1)


def test_a_row_that_samples_nothing_stays_as_it_is(worker: Worker) -> None:
    attachment = worker.attach()
    sequence = make_sequence(0, make_prompt(8), [1], prompt_only=True)
    assert attachment.step(new_sequences=[sequence], slots=[0], num_scheduled=[8]) == []
    described = worker.describe()
    assert described.num_live_slots == 1
    attachment.send(slots=[0])
    assert attachment.status().name == "INVALID_ARGUMENT"  # no token is left to compute


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sampling": worker_pb2.RowSampling(top_p=1, pooling=9)}, "pooling: 9 is unknown"),
        (
            {
                "sampling": worker_pb2.RowSampling(
                    top_p=1, pooling=types_pb2.POOLING_LAST, prompt_logprobs=1
                )
            },
            "pooling: cannot be had together with prompt_logprobs",
        ),
        ({"prompt_only": True, "num_prompt_tokens": 39}, "prompt_only: there is output already"),
        (
            {"sampling": scoring(0), "num_computed_tokens": 16, "prompt_output_begin": 15},
            "prompt_output_begin: 15 is among the 16 tokens",
        ),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused_by_name(
    worker: Worker, fields: dict[str, object], reason: str
) -> None:
    attachment = worker.attach()
    new = make_sequence(0, make_prompt(40), [1, 2, 3], **fields)
    attachment.send(new_sequences=[new], slots=[0], num_scheduled=[1])
    assert attachment.status().name == "INVALID_ARGUMENT"
    assert reason in attachment.call.details()


def test_states_that_are_not_finite_are_told_apart() -> None:
    hidden = torch.ones(6, 4)
    hidden[4, 1] = float("nan")
    parts = [
        prompt_outputs.Part(0, 0, 3, first_row=0, num_top=None),
        prompt_outputs.Part(1, 2, 5, first_row=3, num_top=None),
        prompt_outputs.Part(2, 0, 3, first_row=3, num_top=2),
    ]
    rows = torch.zeros(3, 8, dtype=torch.int32)
    found = prompt_outputs.compute_prompt_outputs(
        parts, hidden, rows, lambda some: some @ torch.ones(4, 9), 9
    )
    received = [one.to_host() for one in found]
    assert [prompt_output.is_finite for prompt_output in received] == [True, False, False]
    assert received[0].hidden_sum is not None
    assert np.array_equal(received[0].hidden_sum, [3, 3, 3, 3])
    assert received[1].hidden_sum is None and received[2].logprobs is None


def test_the_debug_view_names_the_question(worker: Worker) -> None:
    attachment = worker.attach()
    attachment.send(
        new_sequences=[
            make_sequence(0, [5, 6], [1], sampling=scoring(4)),
            make_sequence(1, [5, 6], [2], sampling=MEAN, prompt_only=True),
        ],
        slots=[0, 1],
        num_scheduled=[2, 2],
    )
    attachment.receive()
    stub = debug_pb2_grpc.DebugServiceStub(worker.channel)
    described = [
        stub.DescribeRequest(debug_pb2.DescribeRequestRequest(request_id=f"request-{i}")).sampling
        for i in range(2)
    ]
    attachment.cancel()
    assert described == ["greedy; prompt_logprobs 4", "greedy; pooling mean"]
