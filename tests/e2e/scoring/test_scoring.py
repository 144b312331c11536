"""/v1/rerank and /v1/score, equal to the documented decoder scoring with transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.e2e.conftest import Product
from tests.e2e.scores import Theirs, load

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QUERY = "What is the capital of France?"
DOCUMENTS = ["Paris is the capital of France.", "Berlin", "", "naïve 😀 " * 40, "Berlin"]


@pytest.fixture(scope="module")
def product(tiny_product: Product) -> Product:
    return tiny_product


@pytest.fixture(scope="module")
def theirs(tiny_model: Path) -> Theirs:
    return load(tiny_model)


@pytest.fixture(scope="module")
def expected(theirs: Theirs, tiny_model: Path) -> list[float]:
    """p(yes) / (p(yes) + p(no)) of the first token, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = [tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no")]
    scores = []
    for document in DOCUMENTS:
        question = f"<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {document}"
        turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        logprobs, _ = theirs(tokenizer.encode(text, add_special_tokens=False))
        scores.append(torch.softmax(logprobs[-1, ids].double(), 0)[0].item())
    return scores


def test_reranked_documents_have_the_scores_of_transformers(
    product: Product, expected: list[float]
) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS}
    for _ in range(2):  # the second time the prompts are cached
        answer = product.post("/v1/rerank", body).json()
        found = {r["index"]: r["relevance_score"] for r in answer["results"]}
        assert [found[i] for i in range(len(DOCUMENTS))] == pytest.approx(expected, abs=1e-4)
        order = [result["index"] for result in answer["results"]]
        assert order == sorted(order, key=lambda index: (-found[index], index))
    assert len({round(score, 3) for score in expected}) > 2  # the reference tells them apart


def test_scores_of_pairs_are_the_same(product: Product, expected: list[float]) -> None:
    body = {"text_1": QUERY, "text_2": DOCUMENTS}
    answer = product.post("/score", body).json()
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected, abs=1e-4)
