"""A product with an FP8 KV cache and too few blocks: preempted, recovered and forked as ever."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import pagewire
from tests.e2e.conftest import Product

PROMPTS = [f"{index} stories about the sea, of which the first begins:" for index in range(12)]
GREEDY = pagewire.SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def product(terse_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    # 24 blocks of 16 tokens: some 4 of these requests, however far apart threads send them.
    small = ("--threads", "1", "--max-model-len", "256", "--num-kv-blocks", "25")
    kind = ("--kv-cache-dtype", "fp8_e4m3")
    with Product(terse_model, tmp_path_factory.mktemp("logs"), (*small, *kind)) as running:
        running.start()
        yield running


@pytest.fixture(scope="module")
def sdk(product: Product) -> Iterator[pagewire.Client]:
    with product.sdk() as client:
        yield client


def test_preempted_recovered_and_forked_tokens_are_those_of_a_calm_run(
    product: Product, sdk: pagewire.Client
) -> None:
    calm = [sdk.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
    status = product.status()
    assert status["kv_cache_dtype"] == "fp8_e4m3"
    assert not int(status.get("num_preemptions", 0))
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        crowded = list(pool.map(lambda prompt: sdk.generate(prompt, GREEDY), PROMPTS))
        assert [one.token_ids for one in crowded] == calm
        assert int(product.status().get("num_preemptions", 0)) > 0
        futures = [pool.submit(sdk.generate, prompt, GREEDY) for prompt in PROMPTS]
        product.kill_worker()
        product.start_worker()
        assert [future.result().token_ids for future in futures] == calm
