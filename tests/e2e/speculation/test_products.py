"""Outputs with drafts are those without, token for token, through all three services."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import pagewire
from tests.e2e.conftest import Product
from tests.e2e.metrics.metrics_load import read_metrics, urls_of
from tests.e2e.speculation.asked import (
    REPEATING,
    ask,
    cases_of,
    check_same,
    count_of,
)
from tests.pace import patience

SMALL = ("--threads", "1", "--max-model-len", "768", "--num-kv-blocks", "60")
CONFIGS = {
    "ngram": '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}',
    "suffix": '{"method": "suffix", "num_speculative_tokens": 6}',
    "draft_model": '{"method": "draft_model", "num_speculative_tokens": 4}',
    "draft_model on two ranks": '{"method": "draft_model", "num_speculative_tokens": 3}',
}
FEW = tuple(range(400, 406))
CASES = cases_of(FEW)
NUM_TOKENS = 32
MOST_TRIES = 20  # after some thousand steps without drafts they are tried as at first


def _answer(client: pagewire.Client, name: str) -> pagewire.Completion:
    return ask(client, REPEATING, NUM_TOKENS, CASES[name])


@pytest.fixture(scope="module")
def expected(
    terse_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, pagewire.Completion]:
    """The answers of a product that drafts nothing."""
    plain = Product(terse_model, tmp_path_factory.mktemp("plain"), SMALL)
    try:
        plain.start()
        with plain.sdk() as client:
            return {name: _answer(client, name) for name in CASES}
    finally:
        plain.kill()


@pytest.fixture(scope="module", params=CONFIGS)
def drafting(
    request: pytest.FixtureRequest, terse_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Product]:
    product = Product(terse_model, tmp_path_factory.mktemp("drafting"), SMALL)
    try:
        if "draft_model" in request.param:  # the same model: all that it drafts comes true
            product.worker_options += ("--draft-model", str(terse_model))
        if "two ranks" in request.param:
            product.worker_options += ("--tensor-parallel-size", "2")
        product.start_worker()
        product.start_scheduler("--speculative-config", CONFIGS[request.param])
        product.start_gateway()
        product.wait_until_ready()
        yield product
    finally:
        product.kill()


@pytest.mark.parametrize("name", CASES)
def test_drafts_change_no_token(
    drafting: Product, expected: dict[str, pagewire.Completion], name: str
) -> None:
    with drafting.sdk() as client:
        answer = _answer(client, name)
    check_same(answer, expected[name])


def test_what_repeats_is_drafted_and_comes_true(
    drafting: Product, expected: dict[str, pagewire.Completion]
) -> None:
    params = pagewire.SamplingParams(
        temperature=0, max_tokens=100, ignore_eos=True, allowed_token_ids=FEW[:2]
    )
    with drafting.sdk() as client:
        for _ in range(MOST_TRIES):  # on a busy machine drafts may seem slow for a while
            client.generate(REPEATING, params)
            if count_of(drafting, "num_accepted_tokens"):
                break
    num_drafted = count_of(drafting, "num_drafted_tokens")
    num_accepted = count_of(drafting, "num_accepted_tokens")
    assert 0 < num_accepted <= num_drafted
    told = read_metrics(urls_of(drafting)["scheduler"])
    for name, count in (("draft_tokens", num_drafted), ("accepted_tokens", num_accepted)):
        assert f'vllm:spec_decode_num_{name}_total{{model_name="tiny"}} {count:.1f}\n' in told


def test_drafts_change_no_token_among_others_and_when_the_worker_dies(
    drafting: Product, expected: dict[str, pagewire.Completion]
) -> None:
    names = [name for name in CASES for _ in range(2)]

    def kill_once() -> None:
        enough = count_of(drafting, "num_output_tokens") + 200
        deadline_s = time.monotonic() + patience(120)
        while count_of(drafting, "num_output_tokens") < enough and time.monotonic() < deadline_s:
            time.sleep(0.02)
        drafting.kill_worker()
        drafting.start_worker()

    killing = threading.Thread(target=kill_once)
    with drafting.sdk() as client, ThreadPoolExecutor(len(names)) as pool:
        killing.start()
        answers = list(pool.map(lambda name: _answer(client, name), names))
        killing.join()
    for name, answer in zip(names, answers, strict=True):
        check_same(answer, expected[name])
