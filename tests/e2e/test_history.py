"""The comparison in the kill tests finds and names each fault."""

import pytest

from pagewire.v1 import types_pb2
from tests.e2e.history import History, Piece, judge

STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
TOKENS = [5, 9, 2, 7, 7, 1, 8, 3]


def history(
    token_ids: list[int], *after_end: Piece, count: int | None = None, **end: object
) -> History:
    """A history of two tokens per message, with text and log probabilities, and an end."""
    pieces = [
        Piece(tuple(pair), "".join(f"<{t}>" for t in pair), tuple(-t / 10 for t in pair))
        for pair in (token_ids[i : i + 2] for i in range(0, len(token_ids), 2))
    ]
    fields = {"finish_reason": LENGTH, "completion_tokens": count or len(TOKENS), **end}
    return History([*pieces, Piece(**fields), *after_end])  # type: ignore[arg-type]


def verdict(seen: History) -> str:
    return "; ".join(judge(seen, history(TOKENS)))


def test_an_equal_history_is_right_however_it_was_cut_into_messages() -> None:
    assert verdict(history(TOKENS)) == ""
    whole = History(
        [
            Piece(
                tuple(TOKENS),
                "".join(f"<{t}>" for t in TOKENS),
                tuple(-t / 10 for t in TOKENS),
                LENGTH,
                len(TOKENS),
            )
        ]
    )
    assert verdict(whole) == ""


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([5, 9, 7, 7, 1, 8, 3], "1 tokens are lost at position 2"),
        ([5, 9, 2, 7, 8, 3], "2 tokens are lost at position 4"),
        ([5, 9, 2, 7, 7, 1], "2 tokens are lost at position 6"),
        ([], "8 tokens are lost at position 0"),
        ([5, 9, 2, 9, 2, 7, 7, 1, 8, 3], "2 tokens are repeated at position 3"),
        ([5, 9, 2, 7, 7, 7, 1, 8, 3], "1 tokens are repeated at position 5"),
        ([*TOKENS, 3], "1 tokens are repeated at position 8"),
        ([5, 2, 9, 7, 7, 1, 8, 3], "from position 1 on came in another order"),
        ([5, 9, 2, 7, 6, 1, 8, 3], "the token at position 4 is 6, not 7"),
        ([*TOKENS, 4], "1 tokens too many from position 8 on"),
    ],
)
def test_wrong_tokens_are_named(tokens: list[int], says: str) -> None:
    assert says in verdict(history(tokens))


def test_a_second_end_and_no_end_are_named() -> None:
    assert "it ended 2 times" in verdict(history(TOKENS, Piece(finish_reason=LENGTH)))
    assert "it ended 0 times" in verdict(History(history(TOKENS).pieces[:-1]))


def test_messages_after_the_end_are_named() -> None:
    assert "1 messages came after the end" in verdict(history(TOKENS, Piece(text="!")))


def test_wrong_text_is_named_though_the_tokens_are_right() -> None:
    seen = history(TOKENS)
    seen.pieces[1] = Piece(seen.pieces[1].token_ids, "<2>", seen.pieces[1].logprobs)
    assert "the text is" in verdict(seen)


def test_another_reason_stop_string_or_count_is_named() -> None:
    assert "for FINISH_REASON_STOP" in verdict(history(TOKENS, finish_reason=STOP))
    assert "'x'" in verdict(history(TOKENS, stop_string="x"))
    assert "counts 9 tokens, not 8" in verdict(history(TOKENS, count=9))


def test_wrong_or_missing_log_probabilities_are_named() -> None:
    seen = history(TOKENS)
    seen.pieces[1] = Piece(seen.pieces[1].token_ids, seen.pieces[1].text, (-0.2, -0.5))
    assert "the log probability at position 3 is -0.5, not -0.7" in verdict(seen)
    seen.pieces[1] = Piece(seen.pieces[1].token_ids, seen.pieces[1].text, (-0.2,))
    assert "7 log probabilities came, not 8" in verdict(seen)


def test_a_stream_that_broke_off_is_named() -> None:
    seen = History(history(TOKENS).pieces[:2], "UNAVAILABLE: gone")
    assert "UNAVAILABLE: gone" in verdict(seen) and "lost at position 4" in verdict(seen)
