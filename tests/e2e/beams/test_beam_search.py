"""Beam search through the product: outputs of transformers whatever happens, and no block kept."""

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import pagewire
from tests.e2e.conftest import Product, serving, wait_until_all_is_free
from tests.pace import patience

pytestmark = pytest.mark.slow

NUM_TOKENS = 16
CLOSE_CALL = 1e-4  # scores closer than this may be in either order
# 1 to 58 tokens: shorter and longer than blocks of 16, and at their edges.
PROMPTS = [
    [random.Random(f"prompt {index}").randrange(3, 49152) for _ in range(1 + 3 * index)]
    for index in range(20)
]


@pytest.fixture(scope="module")
def cramped(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    # 39 blocks of 16 tokens.
    small = ("--threads", "1", "--max-model-len", "512", "--num-kv-blocks", "40")
    with serving(tiny_model, tmp_path_factory.mktemp("logs"), small) as running:
        yield running


@pytest.fixture(scope="module")
def sdk(cramped: Product) -> Iterator[pagewire.Client]:
    with cramped.sdk() as client:
        yield client


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Iterator[Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    torch.set_num_threads(before)


def search(
    sdk: pagewire.Client, prompt: Sequence[int], beams: pagewire.BeamSearch, **options: Any
) -> list[pagewire.Completion]:
    """All outputs of a search, best first."""
    n = options.pop("n", beams.num_beams)
    options = {"max_tokens": NUM_TOKENS, "logprobs": 0} | options
    first = sdk.generate(prompt, beam_search=beams, n=n, **options)
    return [first, *first.more]


@torch.inference_mode()
def of_transformers(
    oracle: Any, prompt: Sequence[int], beams: pagewire.BeamSearch, end_ids: Sequence[int]
) -> list[tuple[tuple[int, ...], float]]:
    config = GenerationConfig(
        num_beams=beams.num_beams,
        num_return_sequences=beams.num_beams,
        length_penalty=beams.length_penalty,
        early_stopping=beams.early_stopping,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=list(end_ids),
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    given = torch.tensor([list(prompt)])
    mask = torch.ones_like(given)
    found = oracle.generate(given, attention_mask=mask, generation_config=config)
    outputs = []
    for sequence, score in zip(found.sequences.tolist(), found.sequences_scores, strict=True):
        output = sequence[len(prompt) :]
        ends = [index for index, token_id in enumerate(output) if token_id in end_ids]
        outputs.append((tuple(output[: ends[0] + 1] if ends else output), float(score)))
    return outputs


# Each prompt is asked with two of the three kinds, or with all by PAGEWIRE_ALL_TOKENS=1.
@pytest.mark.parametrize(
    ("num_beams", "length_penalty", "early_stopping", "left_out"),
    [(2, 1.0, False, 0), (4, 1.0, True, 1), (4, 0.0, "never", 2)],
)
def test_twenty_prompts_have_the_outputs_of_transformers(
    cramped: Product,
    sdk: pagewire.Client,
    oracle: Any,
    num_beams: int,
    length_penalty: float,
    early_stopping: Any,
    left_out: int,
) -> None:
    beams = pagewire.BeamSearch(num_beams, length_penalty, early_stopping)
    (model,) = sdk.models()
    num_stopped = num_asked = num_equal = 0
    for index, prompt in enumerate(PROMPTS):
        if index % 3 == left_out and not os.environ.get("PAGEWIRE_ALL_TOKENS"):
            continue
        num_asked += num_beams
        # Every other prompt has tokens that are likely to end its outputs.
        stops = search(sdk, prompt, beams, n=1, max_tokens=6)[0].token_ids[3:5] if index % 2 else ()
        end_ids = [*model.eos_token_ids, *stops]
        found = search(sdk, prompt, beams, stop_token_ids=stops)
        expected = of_transformers(oracle, prompt, beams, end_ids)
        for mine, (token_ids, score) in zip(found, expected, strict=True):
            assert mine.cumulative_logprob is not None
            own_score = mine.cumulative_logprob / len(mine.token_ids) ** length_penalty
            assert own_score == pytest.approx(score, abs=1e-3), f"prompt {index}"
            others = [other for _, other in expected if other != score]
            if all(abs(other - score) > CLOSE_CALL for other in others):
                assert mine.token_ids == token_ids, f"prompt {index}"
                num_equal += 1
        num_stopped += sum(mine.finish_reason == "stop" for mine in found)
    assert num_stopped, "no output ended early: nothing was learned of ends"
    assert num_equal >= 0.9 * num_asked, "too many close calls"
    wait_until_all_is_free(cramped)


def crowd(sdk: pagewire.Client, index: int) -> pagewire.Completion:
    return sdk.generate(f"{index} bottles of", max_tokens=60, ignore_eos=True, seed=index)


def test_a_search_is_the_same_among_others_that_do_not_fit_and_when_the_worker_dies(
    cramped: Product, sdk: pagewire.Client
) -> None:
    beams, prompt = pagewire.BeamSearch(4), PROMPTS[13]
    alone = search(sdk, prompt, beams, max_tokens=24)
    before = int(cramped.status().get("num_preemptions", 0))
    with ThreadPoolExecutor(24) as pool:
        others = [pool.submit(crowd, sdk, index) for index in range(16)]
        searches = [pool.submit(search, sdk, prompt, beams, max_tokens=24) for _ in range(3)]
        for other in others:
            other.result()
        crowded = [one.result() for one in searches]
    assert int(cramped.status().get("num_preemptions", 0)) > before
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(search, sdk, prompt, beams, max_tokens=100)
        deadline = time.monotonic() + patience(60)
        done = int(cramped.status()["num_output_tokens"])
        while int(cramped.status()["num_output_tokens"]) < done + 40:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        cramped.kill_worker()
        assert not running.done(), "too late to disturb it"
        cramped.start_worker()
        disturbed = running.result()
    calm = search(sdk, prompt, beams, max_tokens=100)
    for found, expected in [*((one, alone) for one in crowded), (disturbed, calm)]:
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-2)
        assert found[0].token_ids == expected[0].token_ids
    wait_until_all_is_free(cramped)


def test_searches_that_end_early_leave_no_block(cramped: Product, sdk: pagewire.Client) -> None:
    """By a deadline, by a client that leaves, and by a round that is aborted by its id."""
    cramped.wait_until_ready()
    for wait_s in (0.02, 0.1, 0.2):
        with pytest.raises(pagewire.DeadlineExceeded):
            search(sdk, PROMPTS[5], pagewire.BeamSearch(4), max_tokens=400, timeout_s=wait_s)
    body = {"prompt": PROMPTS[6], "use_beam_search": True, "n": 3, "max_tokens": 400}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{cramped.url}/v1/completions", json=body, timeout=0.2)
    ended: list[Exception] = []

    def run() -> None:
        try:
            beams = pagewire.BeamSearch(4)
            search(sdk, PROMPTS[7], beams, max_tokens=400, request_id="mine")
        except pagewire.PagewireError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + patience(60)
    while thread.is_alive():  # between two rounds there is none to abort
        assert time.monotonic() < deadline
        abort = "pagewire.v1.SchedulerService/Abort"
        cramped.grpcurl(cramped.scheduler_port, abort, data={"request_ids": ["mine"]})
    thread.join()
    assert [type(error) for error in ended] == [pagewire.Cancelled]
    wait_until_all_is_free(cramped)


def test_over_http_it_is_the_same_search(cramped: Product, sdk: pagewire.Client) -> None:
    body = {"prompt": PROMPTS[9], "use_beam_search": True, "n": 2, "best_of": 4}
    body |= {"max_tokens": NUM_TOKENS, "length_penalty": 0.5, "early_stopping": True}
    body |= {"return_token_ids": True}
    answer = cramped.post("/v1/completions", body).json()
    found = [choice["token_ids"] for choice in answer["choices"]]
    beams = pagewire.BeamSearch(4, 0.5, True)
    assert found == [list(one.token_ids) for one in search(sdk, PROMPTS[9], beams, n=2)]
