"""A product with too little memory for its load, and a worker that dies as well.

In all cases, a seed gives the same tokens, a prompt the same scores, and a text the same vector.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import pagewire
from tests.e2e.conftest import Product
from tests.e2e.scores import check_scores, load, long_prompt
from tests.pace import patience

PROMPT = "Seven stories about the sea. The first one begins:"
ALONE = pagewire.SamplingParams(
    temperature=1, seed=7, max_tokens=32, ignore_eos=True, frequency_penalty=0.3, logprobs=2
)


@pytest.fixture(scope="module")
def cramped(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    # 59 blocks of 16 tokens: one long prompt, or about 20 short requests.
    small = ("--threads", "1", "--max-model-len", "768", "--num-kv-blocks", "60")
    with Product(tiny_model, tmp_path_factory.mktemp("logs"), small) as running:
        running.start()
        yield running


@pytest.fixture(scope="module")
def sdk(cramped: Product) -> Iterator[pagewire.Client]:
    with cramped.sdk() as client:
        yield client


def num_preemptions(cramped: Product) -> int:
    return int(cramped.status().get("num_preemptions", 0))


def kill_worker_after(cramped: Product, num_tokens: int) -> None:
    """Kills the worker once `num_tokens` more tokens have been computed, and starts another."""

    def computed() -> int:
        status = cramped.status()
        names = ("num_prefill_tokens", "num_output_tokens")
        return sum(int(status.get(name, 0)) for name in names)

    enough, deadline = computed() + num_tokens, time.monotonic() + patience(120)
    while computed() < enough:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    cramped.kill_worker()
    cramped.start_worker()


def others(sdk: pagewire.Client, index: int) -> pagewire.Completion:
    """A request that shares no prefix with the observed one."""
    return sdk.generate(
        f"{index} bottles of",
        temperature=0.5 + index / 30,
        seed=index,
        max_tokens=40,
        ignore_eos=True,
        presence_penalty=index / 20,
        logprobs=index % 3,
        **({"top_p": 0.8} if index % 2 else {"top_k": 20}),  # type: ignore[arg-type]
    )


def among_31_others(sdk: pagewire.Client, disturb: Callable[[], None]) -> pagewire.Completion:
    with ThreadPoolExecutor(32) as pool:
        futures = [pool.submit(others, sdk, index) for index in range(31)]
        watched = pool.submit(sdk.generate, PROMPT, ALONE)
        disturb()
        for future in futures:
            future.result()
        return watched.result()


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_whatever_happens(
    cramped: Product, sdk: pagewire.Client
) -> None:
    """Temperature 1: alone, in a batch of 32 that does not fit, and when the worker is killed."""
    alone = sdk.generate(PROMPT, ALONE)
    assert len(set(alone.token_ids)) > 10
    assert num_preemptions(cramped) == 0
    crowded = among_31_others(sdk, disturb=lambda: None)
    assert num_preemptions(cramped) > 0
    assert crowded.token_ids == alone.token_ids
    killed = among_31_others(sdk, disturb=lambda: kill_worker_after(cramped, 500))
    assert killed.token_ids == alone.token_ids
    for disturbed in (crowded, killed):
        assert [token.logprob for token in disturbed.logprobs] == pytest.approx(
            [token.logprob for token in alone.logprobs], abs=1e-4
        )


@pytest.mark.slow
def test_scores_and_embeddings_survive_preemptions_and_the_death_of_the_worker(
    cramped: Product, sdk: pagewire.Client, tiny_model: Path
) -> None:
    """Four long prompts, of which one and a half fit: no position is repeated or missing."""
    cramped.wait_until_ready()
    prompts = [long_prompt(sdk, 600, seed=10 + i) for i in range(2)]
    scored: dict[int, pagewire.Completion] = {}
    embedded: list[pagewire.Embeddings] = []

    def score(index: int) -> None:
        scored[index] = sdk.generate(prompts[index], prompt_logprobs=3, max_tokens=2)

    def embed() -> None:
        embedded.append(sdk.embed(prompts, pooling="mean", normalize=False))

    threads = [threading.Thread(target=score, args=(index,)) for index in range(2)]
    threads.append(threading.Thread(target=embed))
    for thread in threads:
        thread.start()
    kill_worker_after(cramped, 550)  # a step has 512 tokens, so the second is running
    assert any(thread.is_alive() for thread in threads), "too late to disturb anybody"
    for thread in threads:
        thread.join(patience(240))
    theirs = load(tiny_model)
    for index, prompt in enumerate(prompts):
        check_scores(scored[index], prompt, theirs)
        _, states = theirs(prompt)
        vector = embedded[0].vectors[index]
        assert vector == pytest.approx(states.mean(0).tolist(), abs=1e-3, rel=1e-4)
