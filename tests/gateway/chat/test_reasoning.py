"""Reasoning is separated from the answer however the text is split."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.formats import REASONING
from gateway.chat.parts import reply_of
from gateway.chat.reasoning import reasoning_parser

# (text, whether the prompt opened the reasoning, reasoning, content)
CASES = [
    ("<think>\nHm. <b>\n</think>\n\nHello\n", False, "Hm. <b>", "Hello\n"),
    ("\n<think>Hm.</think>Hello", False, "Hm.", "Hello"),
    ("Hm.\n</think>\n\nHello", True, "Hm.", "Hello"),
    ("<think>Hm.</think>Hello", True, "Hm.", "Hello"),  # opened twice
    ("<think>\n\n</think>\n\nHello", False, None, "Hello"),
    ("<think>Hm. </thin", False, "Hm. </thin", ""),  # incomplete
    ("<think>Hm. \n", False, "Hm. \n", ""),
    ("Never closed", True, "Never closed", ""),
    ("  Hello <think>x</think>", False, None, "  Hello <think>x</think>"),
    ("<thin", False, None, "<thin"),
    ("", False, None, ""),
    ("</think>", True, None, ""),
    ("<think>a</think>b</think>c", False, "a", "b</think>c"),
]


def read(pieces: list[str], is_open: bool) -> tuple[str | None, str]:
    parser = reasoning_parser(REASONING["qwen3"], is_open=is_open)
    parts = [part for piece in pieces for part in parser.push(piece)]
    reply = reply_of(parts + parser.push("", is_last=True))
    return reply.reasoning, reply.content


@pytest.mark.parametrize(("text", "is_open", "reasoning", "content"), CASES)
def test_reasoning_is_split_from_the_answer_wherever_the_text_is_cut(
    text: str, is_open: bool, reasoning: str | None, content: str
) -> None:
    assert read([text], is_open) == (reasoning, content)
    assert read(list(text), is_open) == (reasoning, content)
    for cut in range(len(text) + 1):
        assert read([text[:cut], text[cut:]], is_open) == (reasoning, content), cut


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think", "\n", " ", "a", "é"])),
    st.lists(st.integers(0, 60), max_size=5),
    st.booleans(),
)
def test_any_text_is_read_the_same_however_it_is_cut(
    words: list[str], cuts: list[int], is_open: bool
) -> None:
    text = "".join(words)
    edges = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    whole = reasoning, content = read([text], is_open)
    assert read(pieces, is_open) == whole
    if reasoning is None and not is_open and not text.lstrip().startswith("<think>"):
        assert content == text


def test_a_prompt_that_ends_with_the_marker_opens_the_reasoning() -> None:
    is_open = REASONING["qwen3"].is_open_at_end
    assert is_open("<|im_start|>assistant\n<think>\n")
    assert not is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not is_open("what is <think>?<|im_end|>\n<|im_start|>assistant\n")
