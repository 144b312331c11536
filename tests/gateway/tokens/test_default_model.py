"""The embedded model's tokenizer gives the same ids as transformers' on real text."""

import random
from pathlib import Path
from typing import Any

import pytest
import transformers

from default_model import folder
from gateway.chat.conversation import Conversation, Message
from gateway.tokens.tokenizer import Tokenizer

TEXTS = [
    "The capital of France is Paris.",
    "def f(x):\n    return [i ** 2 for i in range(x)]  # squares\n",
    "日本語、中文、한국어 и русский. Ελληνικά עברית العربية हिन्दी ไทย",
    "😀🎉 👩‍👩‍👧‍👦 🇫🇷 e\u0301 a\u0308 \u200b \ufeff \u00a0",
    "   leading, trailing   and\t\tinner \r\n\r\n spaces   ",
    "1234567890 3.14159 1e-9 0xDEADBEEF $1,234.56",
]


@pytest.fixture(scope="module")
def model_folder() -> Path:
    return folder.ensure()


@pytest.fixture(scope="module")
def real(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


@pytest.fixture(scope="module")
def theirs(model_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(model_folder)


@pytest.mark.parametrize("text", TEXTS)
async def test_a_text_has_the_ids_that_transformers_gives_it(
    text: str, real: Tokenizer, theirs: Any
) -> None:
    ids = await real.encode("prompt", text, add_special_tokens=True)
    assert ids == theirs(text)["input_ids"]
    detokenizer = real.detokenizer(skip_special_tokens=True)
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == text


@pytest.mark.parametrize("with_system", [True, False])
async def test_a_chat_has_the_ids_that_transformers_gives_it(
    with_system: bool, real: Tokenizer, theirs: Any
) -> None:
    turns = [("system", "Answer briefly.")] if with_system else []
    turns += [("user", TEXTS[3]), ("assistant", TEXTS[2]), ("user", TEXTS[4])]
    conversation = Conversation(tuple(Message(role, content) for role, content in turns))
    text = real.render(conversation)
    ids = await real.encode("messages", text, add_special_tokens=False)
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == expected


@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_join_to_what_decode_says(skip: bool, real: Tokenizer) -> None:
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(real.vocab_size) for _ in range(draw.randrange(1, 60))]
        detokenizer = real.detokenizer(skip_special_tokens=skip)
        pieces = [detokenizer.push(ids[i : i + 3]) for i in range(0, len(ids), 3)]
        joined = "".join(pieces) + detokenizer.flush()
        assert joined == real.decode(ids, skip_special_tokens=skip)
