"""Greedy output of the whole path equals transformers, token for token, on varied prompts.

Each output is checked against transformers' own argmax at every position, with the output so far as
its input: equal everywhere means that its greedy search gives the same tokens.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagewire.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.e2e.conftest import Product
from tests.oracle import first_differences
from tests.pace import patience

# One stream at a time takes most of the time; what follows is computed together.
# PAGEWIRE_ALL_TOKENS=1 runs 64 tokens both ways, in some minutes.
IS_LONG = bool(os.environ.get("PAGEWIRE_ALL_TOKENS"))
NUM_ALONE, NUM_TOKENS = (64, 64) if IS_LONG else (4, 17)

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three uses for a paperclip.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "What is 17 times 23?",
    "Summarise the plot of Cinderella.",
]
TEXTS = [
    "Once upon a time",
    "The three laws of thermodynamics state that",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nx = np.",
    "SELECT name, age FROM users WHERE",
    "<html>\n<head>\n<title>",
    "#include <stdio.h>\n\nint main(",
    "Dear Sir or Madam,\n\nI am writing to",
    "Breaking news: scientists have",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "1, 1, 2, 3, 5, 8, 13,",
    "Monday, Tuesday, Wednesday,",
    "La capitale de la France est",
    "El perro corre por",
    "Die Katze sitzt auf",
    "La vita è bella perché",
    "こんにちは、世界。今日は",
    "北京是中国的",
    "Москва является столицей",
    "مرحبا بالعالم",
    "😀😃😄 emoji are",
    "naïve café résumé",
    "A" * 50,
    "a b c d e f g h i j k l m n o p q r s t u v w x y",
    "Q: What colour is grass?\nA:",
    "Q: 2 + 2 = ?\nA:",
    '{"name": "Alice", "age":',
    "- item one\n- item two\n-",
    "| a | b |\n|---|---|\n| 1 |",
    "x = 3; y = 4; print(x",
    "In 1969, Neil Armstrong",
    "Water boils at 100 degrees",
    "The mitochondria is",
    "To be, or not to be,",
    "It was the best of times,",
    "Four score and seven years ago",
    "The patient presented with",
    "Pursuant to section 4 of the agreement,",
    "\n\n\n",
    "!",
]


@pytest.fixture(scope="module")
def oracle(model: Path) -> Iterator[torch.nn.Module]:
    before = torch.get_num_threads()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    yield loaded.eval()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    return [*chats, *(tokenizer(text)["input_ids"] for text in TEXTS)]


def generate(product: Product, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    greedy = types_pb2.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with grpc.insecure_channel(f"127.0.0.1:{product.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(
            prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt)),
            options=inference_pb2.GenerationOptions(sampling=greedy),
        )
        return list(stub.Generate(request, timeout=patience(120)).output.token_ids)


@pytest.mark.slow
def test_fifty_prompts_alone_and_sixteen_at_a_time_equal_transformers(
    product: Product, oracle: torch.nn.Module, prompts: list[list[int]]
) -> None:
    assert len(prompts) == 50
    alone = [generate(product, prompt, NUM_ALONE) for prompt in prompts]
    together: dict[int, list[int]] = {}

    def run(start: int) -> None:
        for index in range(start, len(prompts), 16):
            together[index] = generate(product, prompts[index])

    threads = [threading.Thread(target=run, args=(start,)) for start in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(300))
    judged: dict[str, tuple[list[int], list[int]]] = {}  # prompt and output, by what they are
    for index, prompt in enumerate(prompts):
        assert (len(alone[index]), len(together[index])) == (NUM_ALONE, NUM_TOKENS)
        judged[f"prompt {index} together"] = prompt, together[index]
        if alone[index] != together[index][:NUM_ALONE]:
            judged[f"prompt {index} alone"] = prompt, alone[index]
    positions = first_differences(oracle, *zip(*judged.values(), strict=True))
    found = {name: at for name, at in zip(judged, positions, strict=True) if at is not None}
    assert found == {}


@pytest.mark.slow
def test_generate_of_transformers_gives_the_same_tokens(
    product: Product, oracle: torch.nn.Module, prompts: list[list[int]]
) -> None:
    for prompt in prompts[:2]:
        with torch.inference_mode():
            expected = oracle.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0
            )[0, len(prompt) :].tolist()
        # Our output continues past the end-of-sequence token that ended theirs.
        assert generate(product, prompt)[: len(expected)] == expected
