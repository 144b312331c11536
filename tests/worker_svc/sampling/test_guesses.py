"""Rows that guess their tokens: no other token than with whole masks, and no thread that waits."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from tests.worker_svc.conftest import VOCAB_SIZE
from tests.worker_svc.spelling import DIGITS, EOS, SUMS, make_tokenizer
from wire.grammar import Matcher, new_matcher, read_vocabulary
from worker_svc.protocol.step import IntColumn
from worker_svc.sampling import mask_filling as module
from worker_svc.sampling.grammars import Grammars
from worker_svc.sampling.mask_filling import GUESS_S, NUM_GUESSES, GrammarPlace, Guesses, MaskFiller

NUM_WORDS = -(-VOCAB_SIZE // 32)
NUM_ROWS = 6
VOCABULARY = read_vocabulary(make_tokenizer().to_str(), VOCAB_SIZE, [EOS])


def places(filtered: Sequence[int] = ()) -> list[GrammarPlace]:
    found = []
    for row in range(NUM_ROWS):
        built: Future[Matcher] = Future()
        built.set_result(new_matcher(VOCABULARY, (DIGITS, SUMS)[row % 2]))
        found.append(GrammarPlace(built, 0, draws_from_all=row not in filtered))
    return found


def brought(tokens: IntColumn) -> Guesses:
    guesses = Guesses()
    guesses.bring(lambda: tokens)
    guesses.give_up()  # too late, and without effect
    return guesses


def bits(masks: np.ndarray) -> np.ndarray:
    return np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB_SIZE] == 1


def fill(
    filler: MaskFiller,
    rows: list[GrammarPlace],
    unread: IntColumn | None,
    guesses: Guesses | None = None,
) -> np.ndarray:
    each = [np.zeros(0, dtype=np.int64)] * len(rows) if unread is None else unread[:, None]
    masks = np.full((len(rows), NUM_WORDS), -1, dtype=np.int32)  # what was there before
    assert filler.fill(rows, list(each), masks, guesses) == {}
    return bits(masks)


def test_a_guess_that_is_accepted_is_all_that_its_row_may_take() -> None:
    whole = fill(MaskFiller(), places(), None)
    inside = np.array([np.flatnonzero(row)[row.sum() // 2] for row in whole])
    outside = np.array([np.flatnonzero(~row)[0] for row in whole])
    tokens = np.where(np.arange(NUM_ROWS) < 3, inside, outside)
    tokens[5] = -1  # its logits were not finite
    masks = fill(MaskFiller(), places(filtered=[1]), None, brought(tokens))
    alone = np.eye(VOCAB_SIZE, dtype=bool)[tokens]
    for row in range(NUM_ROWS):
        assert np.array_equal(masks[row], alone[row] if row in (0, 2) else whole[row]), row


@pytest.mark.parametrize("seed", range(8))
def test_the_drawn_tokens_are_those_of_whole_masks(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = {guesses: places() for guesses in (False, True)}
    filler, unread, num_alone = MaskFiller(), None, 0
    for _ in range(9):
        # Few values, so that the best one is often shared by several tokens.
        scores = random.integers(0, 3 + 3 * seed, (NUM_ROWS, VOCAB_SIZE))
        whole = fill(filler, rows[False], unread)
        scores += whole * random.integers(0, 3, (NUM_ROWS, 1))  # and it is often an allowed one
        masks = fill(filler, rows[True], unread, brought(scores.argmax(1)))
        num_alone += int((masks.sum(1) < whole.sum(1)).sum())
        drawn, guessed = (np.where(mask, scores, -1).argmax(1) for mask in (whole, masks))
        assert np.array_equal(drawn, guessed)
        unread = drawn
    assert num_alone


@pytest.mark.parametrize("token", [0, 31, 32, 63, VOCAB_SIZE - 1])
def test_one_token_is_one_bit(token: int) -> None:
    masks = np.full((3, NUM_WORDS), -1, dtype=np.int32)
    module._allow_alone(masks, [2, 0], np.array([token, 5, 7]))
    assert [np.flatnonzero(row).tolist() for row in bits(masks)[[0, 2]]] == [[token], [7]]
    assert bits(masks)[1].all()


def test_without_guesses_whole_masks_are_filled() -> None:
    guesses = Guesses()
    guesses.give_up()
    guesses.give_up()
    assert np.array_equal(
        fill(MaskFiller(), places(), None, guesses), fill(MaskFiller(), places(), None)
    )


def test_a_library_that_cannot_read_a_guess_fills_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panics:
        def validate_tokens(self, tokens: list[int]) -> int:
            raise BaseException("a panic")

    assert module._accepted({0: Panics()}, np.array([3])) == set()  # type: ignore[dict-item]


class Slow:
    """A filler whose masks take a given time, by a clock that nothing else moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mask_s: float, accepts: bool) -> None:
        self.now_s, self.filler = 0.0, MaskFiller()
        self.places = places()
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(module.time, "thread_time", lambda: self.now_s)
        monkeypatch.setattr(MaskFiller, "_to_time", lambda *rows: [])
        monkeypatch.setattr(MaskFiller, "_fill_together", self._together)
        monkeypatch.setattr(module, "_accepted", lambda rows, _: set(rows) if accepts else set())
        self._mask_s = mask_s

    def _together(self, rows: list[object], masks: object, problems: object) -> None:
        self.now_s += self._mask_s if rows else 0.0

    def steps(self, number: int) -> list[bool]:
        """The steps, with True for rows that guessed."""
        found = []
        for _ in range(number):
            found.append(self.filler.wants_guesses)
            guesses = brought(np.zeros(NUM_ROWS, dtype=np.int64)) if found[-1] else None
            fill(self.filler, self.places, None, guesses)
        return found


def test_rows_guess_after_a_slow_step_for_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [False, *[True] * NUM_GUESSES]
    assert Slow(monkeypatch, 2 * GUESS_S, accepts=True).steps(2 * len(some)) == some * 2


def test_rows_whose_guesses_save_nothing_rest_for_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [False, True, *[False] * NUM_GUESSES]
    assert Slow(monkeypatch, 2 * GUESS_S, accepts=False).steps(2 * len(some)) == some * 2


def test_rows_with_quick_masks_never_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(Slow(monkeypatch, GUESS_S / 2, accepts=True).steps(40))


def test_a_launch_that_fails_holds_up_no_mask() -> None:
    grammars = Grammars(VOCAB_SIZE, lambda: VOCABULARY)
    grammars.fill_for(torch.device("cpu"), NUM_ROWS)
    grammars._masks._num_to_guess = 2
    nothing, rows = np.zeros(NUM_ROWS, dtype=np.int64), np.arange(NUM_ROWS)
    failed = grammars.fill(rows, places(), nothing, lambda: nothing[:0])
    assert failed.guesses is not None and not failed.filling.done()
    grammars.give_up()
    assert np.array_equal(bits(failed.filling.result().allowed), fill(MaskFiller(), places(), None))
    by_kernels = grammars.fill(rows, places(), nothing, lambda: nothing[:0])
    masks = by_kernels.on(torch.device("cpu")).numpy()
    assert np.array_equal(bits(masks), fill(MaskFiller(), places(), None))
    some_filter = grammars.fill(
        rows, places(filtered=range(NUM_ROWS)), nothing, lambda: nothing[:0]
    )
    assert some_filter.guesses is None
