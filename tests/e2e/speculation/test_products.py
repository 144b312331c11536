"""Outputs with drafts are those without, token for token, through all three services."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import pagewire
from tests.e2e.conftest import Product
from tests.e2e.metrics.metrics_load import read_metrics, urls_of
from tests.pace import patience

SMALL = ("--threads", "1", "--max-model-len", "768", "--num-kv-blocks", "60")
CONFIGS = {
    "ngram": '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}',
    "suffix": '{"method": "suffix", "num_speculative_tokens": 6}',
    "draft_model": '{"method": "draft_model", "num_speculative_tokens": 4}',
    "draft_model on two ranks": '{"method": "draft_model", "num_speculative_tokens": 3}',
}
REPEATING = "one two three four five six seven eight nine ten. " * 6
# The model's words have no sense; a bias towards few of them has outputs repeat themselves.
FEW = tuple(range(400, 406))
CASES = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "seed": 7},
    "few words": {"temperature": 1.0, "seed": 3, "allowed_token_ids": FEW},
    "penalties": {
        "temperature": 0.7,
        "seed": 11,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "allowed_token_ids": FEW,
    },
    "logprobs": {"temperature": 0.0, "logprobs": 3, "allowed_token_ids": FEW},
    "choices": {"temperature": 1.0, "seed": 5, "n": 2, "allowed_token_ids": FEW},
    "stop token": {
        "temperature": 1.0,
        "seed": 13,
        "allowed_token_ids": FEW,
        "stop_token_ids": (FEW[0],),
        "min_tokens": 9,
        "ignore_eos": False,
    },
    "bad words": {
        "temperature": 1.0,
        "seed": 17,
        "allowed_token_ids": FEW,
        "logit_bias": {FEW[1]: 1.5},
    },
    "grammar": {
        "temperature": 1.0,
        "seed": 19,
        "structured_output": pagewire.Regex("[a-f]{9}( [a-f]{3}){4}"),
        "ignore_eos": False,
    },
}
NUM_TOKENS = 32


@contextmanager
def _client(product: Product) -> Iterator[pagewire.Client]:
    with pagewire.Client(f"127.0.0.1:{product.grpc_port}", timeout_s=patience(240)) as client:
        yield client


def _answer(client: pagewire.Client, name: str) -> pagewire.Completion:
    fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **CASES[name]}
    return client.generate(REPEATING, **fields)  # type: ignore[arg-type]


def _tokens(answer: pagewire.Completion) -> list[tuple[int, ...]]:
    return [choice.token_ids for choice in (answer, *answer.more)]


def _counts(product: Product) -> tuple[int, int]:
    status = product.status()
    return int(status.get("num_drafted_tokens", 0)), int(status.get("num_accepted_tokens", 0))


@pytest.fixture(scope="module")
def expected(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, pagewire.Completion]:
    """The answers of a product that drafts nothing."""
    plain = Product(tiny_model, tmp_path_factory.mktemp("plain"), SMALL)
    try:
        plain.start()
        with _client(plain) as client:
            return {name: _answer(client, name) for name in CASES}
    finally:
        plain.kill()


@pytest.fixture(scope="module", params=CONFIGS)
def drafting(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Product]:
    product = Product(tiny_model, tmp_path_factory.mktemp("drafting"), SMALL)
    try:
        if "draft_model" in request.param:  # the same model: all that it drafts comes true
            product.worker_options += ("--draft-model", str(tiny_model))
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
    with _client(drafting) as client:
        answer = _answer(client, name)
    assert _tokens(answer) == _tokens(expected[name])
    assert answer.finish_reason == expected[name].finish_reason
    assert [top.logprob for top in answer.logprobs] == pytest.approx(
        [top.logprob for top in expected[name].logprobs], abs=1e-3
    )


def test_what_repeats_is_drafted_and_comes_true(
    drafting: Product, expected: dict[str, pagewire.Completion]
) -> None:
    params = pagewire.SamplingParams(
        temperature=0, max_tokens=100, ignore_eos=True, allowed_token_ids=FEW[:2]
    )
    with _client(drafting) as client:
        client.generate(REPEATING, params)
    num_drafted, num_accepted = _counts(drafting)
    assert 0 < num_accepted <= num_drafted
    told = read_metrics(urls_of(drafting)["scheduler"])
    for name, count in (("draft_tokens", num_drafted), ("accepted_tokens", num_accepted)):
        assert f'vllm:spec_decode_num_{name}_total{{model_name="tiny"}} {count:.1f}\n' in told


def test_drafts_change_no_token_among_others_and_when_the_worker_dies(
    drafting: Product, expected: dict[str, pagewire.Completion]
) -> None:
    names = [name for name in CASES for _ in range(2)]

    def kill_once() -> None:
        before, deadline = _num_output(drafting), time.monotonic() + patience(120)
        while _num_output(drafting) < before + 200 and time.monotonic() < deadline:
            time.sleep(0.02)
        worker = drafting.processes["worker_svc"]
        worker.kill()
        worker.wait()
        drafting.start_worker()

    killing = threading.Thread(target=kill_once)
    with _client(drafting) as client, ThreadPoolExecutor(len(names)) as pool:
        killing.start()
        answers = list(pool.map(lambda name: _answer(client, name), names))
        killing.join()
    for name, answer in zip(names, answers, strict=True):
        assert _tokens(answer) == _tokens(expected[name]), name


def _num_output(product: Product) -> int:
    return int(product.status().get("num_output_tokens", 0))
