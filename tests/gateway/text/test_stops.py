"""Stop strings are found however the text is split, and no part of them is shown."""

import random
import time

import pytest

from gateway.text.stops import StopMatcher


def run(
    stops: tuple[str, ...], pieces: list[str], *, include: bool = False
) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_in_output=include)
    shown = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


@pytest.mark.parametrize(
    ("stops", "text", "shown", "stop"),
    [
        (("END",), "abcENDdef", "abc", "END"),
        (("END",), "abcEN", "abcEN", None),
        (("END",), "EENEND", "EEN", "END"),
        (("aab",), "aaaab", "aa", "aab"),
        (("abc", "b"), "xabc", "xa", "b"),  # b ends first
        (("abc", "c"), "xabc", "x", "abc"),  # both end together: the longest
        (("\n\n",), "one\ntwo\n\nthree", "one\ntwo", "\n\n"),
        (("中文",), "这是中文字", "这是", "中文"),
        (("ab", "ab"), "xab", "x", "ab"),
    ],
)
def test_a_stop_string_is_found_in_whole_text_and_letter_by_letter(
    stops: tuple[str, ...], text: str, shown: str, stop: str | None
) -> None:
    assert run(stops, [text]) == (shown, stop)
    assert run(stops, list(text)) == (shown, stop)


def test_the_stop_string_is_kept_when_wanted() -> None:
    assert run(("END",), ["abE", "NDdef"], include=True) == ("abEND", "END")


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(("###END",), include_in_output=False)
    assert matcher.push("hello #") == ("hello ", None)
    assert matcher.push("#") == ("", None)
    assert matcher.push("x") == ("##x", None)


def test_nothing_is_held_back_when_the_stop_string_is_kept() -> None:
    matcher = StopMatcher(("###END",), include_in_output=True)
    assert matcher.push("hello ##") == ("hello ##", None)
    assert matcher.push("#END!") == ("#END", "###END")


def test_a_match_that_may_not_count_yet_is_ordinary_text() -> None:
    matcher = StopMatcher(("ab",), include_in_output=False)
    early, stop = matcher.push("xab", may_stop=False)
    assert stop is None
    late, stop = matcher.push("yab")
    assert (early + late, stop) == ("xaby", "ab")


def test_random_texts_agree_with_a_plain_search_however_they_are_cut() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        stops = tuple(
            "".join(draw.choices("ab", k=draw.randrange(1, 5))) for _ in range(draw.randrange(1, 4))
        )
        text = "".join(draw.choices("abc", k=draw.randrange(20)))
        # The match that ends first wins, then the longest.
        ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
        expected: tuple[str, str | None] = (text, None)
        if ends:
            end, _, stop = min(ends)
            expected = (text[: end - len(stop)], stop)
        cuts = sorted(draw.choices(range(len(text) + 1), k=3))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert run(stops, pieces) == expected


def test_the_cost_grows_with_the_text_and_not_with_the_stop_strings() -> None:
    # Text that almost matches everywhere is the worst case of a naive search.
    stops = tuple("a" * 1000 + chr(ord("b") + i) for i in range(16))

    def seconds(length: int) -> float:
        matcher = StopMatcher(stops, include_in_output=False)
        start = time.thread_time()
        for _ in range(length // 4):
            matcher.push("aaaa")
        return time.thread_time() - start

    seconds(400)  # builds the automaton
    assert min(seconds(40_000) for _ in range(3)) < 30 * min(seconds(4_000) for _ in range(3))
