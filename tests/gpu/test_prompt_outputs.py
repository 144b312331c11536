"""Prompt outputs on a GPU with two steps in flight, against transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.worker_svc.conftest import make_prompt
from wire.prompt_outputs import HiddenMean, PromptOutput
from worker_svc.config import WorkerConfig
from worker_svc.protocol.step import NewSequence, Pooling, RowSampling, StepInput, StepOutput
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import startup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NUM_TOP = 4
PROMPT = make_prompt(90)
CONFIG = WorkerConfig(
    dtype="float32",
    device="cuda",
    num_kv_blocks=64,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    max_model_len=192,
)


@pytest.fixture(scope="module")
def runner(llama_folder: Path) -> ModelRunner:
    loaded = startup.load(CONFIG, llama_folder, "float32", "")
    built = startup.build_runner(CONFIG, loaded, CONFIG.num_kv_blocks)
    built.warm_up()
    return built


def sequence(slot: int, sampling: RowSampling, prompt_only: bool = False) -> NewSequence:
    return NewSequence(
        slot=slot,
        request_id=f"request-{slot}",
        token_ids=np.array(PROMPT, dtype=np.int32),
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=0,
        block_ids=np.arange(12, dtype=np.int32) + 1 + 12 * slot,
        sampling=sampling,
        prompt_only=prompt_only,
    )


def run(runner: ModelRunner, chunks: list[dict[int, int]], *new: NewSequence) -> list[StepOutput]:
    """Launches every step before reading the results of the previous one."""
    launched = []
    for index, rows in enumerate(chunks):
        step = StepInput(
            step_id=index + 1,
            reset=index == 0,
            new_sequences=new if index == 0 else (),
            slots=np.array(list(rows), dtype=np.int64),
            num_scheduled=np.array(list(rows.values()), dtype=np.int64),
        )
        launched.append(runner.launch(step))
    outputs = [one if isinstance(one, StepOutput) else one.result() for one in launched]
    assert [output.error for output in outputs] == [""] * len(chunks)
    return outputs


def prompt_outputs_of(outputs: list[StepOutput], slot: int) -> list[PromptOutput]:
    return [
        prompt_output
        for output in outputs
        for prompt_output in output.prompt_outputs
        if prompt_output.owner == slot
    ]


@torch.inference_mode()
def test_scores_and_hidden_states_are_those_of_transformers(
    runner: ModelRunner, llama_folder: Path
) -> None:
    scores = sequence(0, RowSampling(num_prompt_logprobs=NUM_TOP))
    pooled = sequence(1, RowSampling(pooling=Pooling.MEAN), prompt_only=True)
    plain = sequence(2, RowSampling())
    chunks = [{0: 40, 1: 30, 2: 50}, {0: 49, 1: 60, 2: 1}, {0: 1, 2: 39}, {0: 1, 2: 1}]
    outputs = run(runner, chunks, scores, pooled, plain)
    model = LlamaForCausalLM.from_pretrained(llama_folder, dtype=torch.float32).eval()
    found = model(torch.tensor([PROMPT]), output_hidden_states=True)
    expected = found.logits[0].log_softmax(-1)
    at = 0
    for prompt_output in prompt_outputs_of(outputs, 0):
        assert prompt_output.begin == at and prompt_output.logprobs is not None
        at = prompt_output.end
        rows = expected[prompt_output.begin : prompt_output.end]
        behind = torch.tensor(PROMPT[prompt_output.begin + 1 : prompt_output.end + 1])[:, None]
        chosen = rows.gather(1, behind)
        assert prompt_output.logprobs.logprobs == pytest.approx(chosen[:, 0].numpy(), abs=1e-4)
        ties = ((rows - chosen).abs() < 1e-4).sum(-1).numpy() - 1
        ranks = (rows >= chosen).sum(-1).numpy()
        assert (np.abs(prompt_output.logprobs.ranks - ranks) <= ties).all()
        assert prompt_output.logprobs.top_token_ids.shape == (
            prompt_output.end - prompt_output.begin,
            NUM_TOP,
        )
    assert at == len(PROMPT) - 1
    mean = HiddenMean()
    for prompt_output in prompt_outputs_of(outputs, 1):
        mean.add(prompt_output)
    value = mean.value()
    assert value is not None
    states = found.hidden_states[-1][0]
    assert value == pytest.approx(states.double().mean(0).numpy(), abs=1e-4)
    assert prompt_outputs_of(outputs, 2) == []
    # Rows without prompt outputs, and with earlier ones, decode as usual.
    greedy = int(expected[-1].argmax())
    assert outputs[2].token_ids.tolist() == [greedy, greedy]
