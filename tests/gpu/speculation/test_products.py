"""Outputs of one GPU and of two, with drafts, through all three services: those of one without.

A worker of each size serves one scheduler after the other, as its start takes most of the time. It
has too few blocks for all that is asked at once.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pagewire
from bench.harness.checkpoints import deepened
from tests.e2e.conftest import Product, wait_until_all_is_free
from tests.e2e.speculation.asked import REPEATING, ask, cases_of, check_same, count_of
from tests.worker_svc.random_models import save_disturbed, save_random_model
from tests.worker_svc.spelling import EOS, VOCAB_SIZE, make_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MODEL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": EOS,
}
SMALL = (
    *("--max-model-len", "512", "--num-kv-blocks", "60"),
    *("--max-num-seqs", "64", "--max-num-batched-tokens", "512"),
)
CONFIGS = {
    "ngram": '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1}',
    "suffix": '{"method": "suffix", "num_speculative_tokens": 8}',
    "draft_model": '{"method": "draft_model", "num_speculative_tokens": 4}',
}
# Of one GPU and of two, and of workers with a draft model.
DRAFTING = (
    *("one ngram", "one suffix", "two ngram"),
    *("one_with_draft draft_model", "two_with_draft draft_model"),
)
DEEPER = 32  # times the layers of what the draft model is made from
NOISE = 0.003  # of the draft model, whose weights are spread by a hundred times as much
PROMPT = REPEATING[:98]  # as many tokens
NUM_TOKENS = 96
FEW = tuple(make_tokenizer().token_to_id(letter) for letter in "abcdef")
PLAIN = cases_of(FEW)
# Mostly one word, but drawn: most drafts come true and some do not, in requests of every kind.
MOSTLY_ONE = {
    "allowed_token_ids": FEW[:3],
    "logit_bias": {FEW[1]: 6.0},
    "max_tokens": 240,
    "temperature": 1.0,
}
FORESEEN = ("seeded", "few words", "penalties", "logprobs", "choices", "stop token")
CASES = {
    **PLAIN,
    **{f"{name}, foreseen": {"seed": 23} | PLAIN[name] | MOSTLY_ONE for name in FORESEEN},
    "one word": {"temperature": 0.0, "allowed_token_ids": FEW[:1], "max_tokens": 240},
}
STOPS, STOPPED = "stop string", "few words, foreseen"  # a case that needs the text of another
# At once, where blocks are short and workers die.
CROWD = [*CASES, STOPS, *(f"{name}, foreseen" for name in FORESEEN), "one word", "one word"]
# A request whose drafts fail keeps a draft model from drafting for the others.
FORESEEN_CROWD = [name for name in CROWD if "foreseen" in name or name == "one word"]
Answers = dict[str, pagewire.Completion]
Futures = list[Future[pagewire.Completion]]


@dataclass(frozen=True, slots=True)
class Asked:
    """The answers of a product that drafts nothing on one GPU."""

    answers: Answers
    stop: str

    def case(self, name: str) -> dict[str, Any]:
        return CASES[STOPPED] | {"stop": [self.stop]} if name == STOPS else CASES[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("models") / "spelling"
    save_random_model(made, (LlamaConfig, LlamaForCausalLM), MODEL)
    make_tokenizer().save(str(made / "tokenizer.json"))
    # If a step is much shorter than its way to the worker and back, no draft pays.
    return deepened(made, made.parent / "deep", DEEPER, MODEL["max_position_embeddings"])


def begun(folder: Path, logs: Path, *options: str) -> Iterator[Product]:
    """A product whose worker and gateway have been started."""
    with Product(folder, logs, (*SMALL, *options), device="cuda") as product:
        product.start_worker()
        product.start_gateway()
        yield product


@pytest.fixture(scope="module")
def one(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    yield from begun(folder, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    yield from begun(folder, tmp_path_factory.mktemp("two"), *of_two())


def of_two() -> tuple[str, str]:
    """The worker's options; skips the test where there are none."""
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices")
    return "--tensor-parallel-size", "2"


@pytest.fixture(scope="module")
def draft(folder: Path) -> tuple[str, ...]:
    """The worker's options: a draft model, which is right now and then, and places for drafts."""
    small = save_disturbed(folder.parent / "spelling", folder.parent / "draft", NOISE)
    return "--draft-model", str(small), "--max-num-seqs", "256"


@pytest.fixture(scope="module")
def one_with_draft(
    folder: Path, draft: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Product]:
    yield from begun(folder, tmp_path_factory.mktemp("one-with-draft"), *draft)


@pytest.fixture(scope="module")
def two_with_draft(
    folder: Path, draft: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Product]:
    logs = tmp_path_factory.mktemp("two-with-draft")
    yield from begun(folder, logs, *of_two(), *draft)


def schedule(product: Product, *options: str) -> None:
    """Puts a scheduler with these options in the place of another."""
    if (before := product.processes.pop("scheduler_svc", None)) is not None:
        before.kill()
        before.wait()
    product.start_scheduler(*options)
    product.wait_until_ready()


@pytest.fixture(scope="module")
def asked(one: Product) -> Asked:
    schedule(one)
    with one.sdk() as client:
        answers = {name: ask(client, PROMPT, NUM_TOKENS, case) for name, case in CASES.items()}
        text = answers[STOPPED].text
        told = Asked(answers, stop=text[len(text) // 2 :][:24])
        answers[STOPS] = stopped = ask(client, PROMPT, NUM_TOKENS, told.case(STOPS))
    assert stopped.stop_reason == told.stop
    assert stopped.text == text[: text.index(told.stop)]
    assert len(set(answers["greedy"].token_ids)) > 10
    assert count_of(one, "num_drafted_tokens") == 0
    return told


@pytest.fixture(scope="module", params=[*DRAFTING, "two"])
def served(request: pytest.FixtureRequest, asked: Asked) -> Product:
    """A product of one GPU or two, with a scheduler of its own that drafts, or does not."""
    size, _, method = request.param.partition(" ")
    product: Product = request.getfixturevalue(size)
    schedule(product, *(("--speculative-config", CONFIGS[method]) if method else ()))
    return product


@pytest.mark.parametrize("name", [*CASES, STOPS])
def test_outputs_are_those_of_one_gpu_without_drafts(
    served: Product, asked: Asked, name: str
) -> None:
    with served.sdk() as client:
        check_same(ask(client, PROMPT, NUM_TOKENS, asked.case(name)), asked.answers[name])


def serve_crowd(
    product: Product,
    asked: Asked,
    disturb: Callable[[Futures], None],
    crowd: Sequence[str] = CROWD,
) -> None:
    """Asks for everything at once; no answer shows how it was disturbed."""
    with product.sdk() as client, ThreadPoolExecutor(len(crowd)) as pool:
        futures = [pool.submit(ask, client, PROMPT, NUM_TOKENS, asked.case(name)) for name in crowd]
        disturb(futures)
        for name, future in zip(crowd, futures, strict=True):
            check_same(future.result(), asked.answers[name])
    product.wait_until_ready()
    wait_until_all_is_free(product)


@pytest.mark.parametrize("served", DRAFTING, indirect=True)
def test_drafts_change_no_output_where_blocks_are_short(
    served: Product, asked: Asked, request: pytest.FixtureRequest
) -> None:
    names = ("num_preemptions", "num_accepted_tokens")
    before = [count_of(served, name) for name in names]
    is_model = request.node.callspec.params["served"].endswith("draft_model")
    crowd = FORESEEN_CROWD if is_model else CROWD
    serve_crowd(served, asked, disturb=lambda futures: None, crowd=crowd)
    for name, count in zip(names, before, strict=True):
        assert count_of(served, name) > count, name
    assert count_of(served, "num_accepted_tokens") < count_of(served, "num_drafted_tokens")


def kill_worker(product: Product) -> None:
    """The whole worker, of one process or more, in whose place another is started."""
    product.kill_worker()
    product.start_worker()


def kill_rank(product: Product) -> None:
    """The second of two; the worker starts both again."""
    told = re.findall(r"rank 1 is process (\d+)\n", product.read_log("worker_svc"))
    os.kill(int(told[-1]), signal.SIGKILL)


def num_losses(product: Product) -> int:
    return int(product.status()["groups"][0].get("num_losses", 0))


@pytest.mark.parametrize(
    ("served", "kill"),
    [(name, kill_worker) for name in DRAFTING] + [("two ngram", kill_rank)],
    indirect=["served"],
)
def test_drafts_change_no_output_when_a_worker_or_a_rank_dies(
    served: Product, asked: Asked, kill: Callable[[Product], None]
) -> None:
    losses, accepted = num_losses(served), []

    def kill_while_drafts_come_true(futures: Futures) -> None:
        enough = count_of(served, "num_accepted_tokens") + 20
        while count_of(served, "num_accepted_tokens") < enough:
            assert not all(future.done() for future in futures), served.status()
            time.sleep(0.005)
        kill(served)
        assert not all(future.done() for future in futures)
        accepted.append(count_of(served, "num_accepted_tokens"))

    serve_crowd(served, asked, kill_while_drafts_come_true)
    assert num_losses(served) > losses
    assert count_of(served, "num_accepted_tokens") > accepted[0]
