"""Output text: a stop string ends text and tokens at the same place."""

from collections.abc import Callable

from gateway.text.output_text import OutputText
from gateway.text.stops import StopMatcher
from gateway.tokens.tokenizer import Tokenizer


def output(tokenizer: Tokenizer, *stops: str, min_tokens: int = 0) -> OutputText:
    matcher = StopMatcher(stops, include_in_output=False) if stops else None
    return OutputText(tokenizer.detokenizer(skip_special_tokens=True), matcher, min_tokens)


def test_tokens_end_with_the_one_that_completed_the_stop_string(
    tokenizer: Tokenizer, encode: Callable[[str], list[int]]
) -> None:
    ids = encode("Hello world STOP and more")
    upto = next(
        n for n in range(len(ids)) if "STO" in tokenizer.decode(ids[:n], skip_special_tokens=True)
    )
    piece = output(tokenizer, "STO").push(ids)
    assert (piece.text, piece.stop_string) == ("Hello world ", "STO")
    assert piece.token_ids == ids[:upto]


def test_steps_of_any_size_give_the_same_output(
    tokenizer: Tokenizer, encode: Callable[[str], list[int]]
) -> None:
    ids = encode("naïve 中文 café END tail")
    results = set()
    for step in (1, 2, 3, len(ids)):
        text = output(tokenizer, "END")
        shown, used = "", 0
        for start in range(0, len(ids), step):
            piece = text.push(ids[start : start + step])
            shown, used = shown + piece.text, used + len(piece.token_ids)
            if piece.stop_string:
                break
        results.add((shown, used, text.num_tokens))
    assert len(results) == 1
    assert results.pop()[0] == "naïve 中文 café "


def test_flush_gives_what_looked_like_the_beginning_of_a_stop_string(
    tokenizer: Tokenizer, encode: Callable[[str], list[int]]
) -> None:
    text = output(tokenizer, "world!")
    assert text.push(encode("Hello world")).text == "Hello "
    assert text.flush().text == "world"


def test_stop_strings_wait_for_min_tokens(
    tokenizer: Tokenizer, encode: Callable[[str], list[int]]
) -> None:
    ids = encode("Paris Paris")
    first = len(encode("Paris"))
    assert output(tokenizer, "Paris", min_tokens=first - 1).push(ids).text == ""
    piece = output(tokenizer, "Paris", min_tokens=first).push(ids)
    assert (piece.text, piece.stop_string) == ("Paris ", "Paris")
    assert piece.token_ids == ids
