"""Outputs for pictures: kept by content, bounded by bytes, and never lost on the way."""

import pytest
import torch

from worker_svc.attention.pictures import EncodedPicture
from worker_svc.protocol.pictures import PictureOrder, Pixels
from worker_svc.protocol.preparations import PreparationOrders
from worker_svc.protocol.step import BadStep, NewSequence, PlacedPicture
from worker_svc.runner.entering_pictures import entering_pictures
from worker_svc.runner.picture_outputs import MAX_BYTES_PER_TURN, PictureOutputs

TOKEN_BYTES = 8  # two numbers in float32


class Encoder:
    """Two numbers for each of four tokens; fails at content that begins with an x."""

    sees_both_ways = False

    def __init__(self) -> None:
        self.encoded: list[bytes] = []

    def problem_with(self, order: PictureOrder) -> str:
        return "" if order.num_tokens == 4 else "four tokens"

    def encode(self, order: PictureOrder) -> EncodedPicture:
        self.encoded.append(order.content_id)
        if order.content_id.startswith(b"x"):
            raise RuntimeError("the device")
        return EncodedPicture(order.content_id, torch.zeros(order.num_tokens, 2), (), None)


class Answers(dict[int, str]):
    """The answers by preparation."""

    def __call__(self, preparation_id: int, problem: str) -> None:
        assert preparation_id not in self, "answered twice"
        self[preparation_id] = problem


def order(number: int, content: bytes, num_bytes: int = 12, num_tokens: int = 4) -> PictureOrder:
    pixels = Pixels(bytes(num_bytes), 1, None, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    return PictureOrder(number, content, num_tokens, pixels)


def ask(
    outputs: PictureOutputs, answers: Answers, *orders: PictureOrder, dropped: tuple[int, ...] = ()
) -> None:
    outputs.take_orders(PreparationOrders((), orders, dropped), answers)


def run(outputs: PictureOutputs) -> int:
    turns = 1
    while outputs.encode_some():
        turns += 1
    return turns


def test_equal_pictures_are_encoded_once_and_the_least_recently_used_goes_first() -> None:
    encoder, answers = Encoder(), Answers()
    outputs = PictureOutputs(encoder, 2 * 4 * TOKEN_BYTES)
    for number, content in enumerate((b"a", b"b", b"a", b"c", b"a", b"b"), 1):
        ask(outputs, answers, order(number, content))
        run(outputs)
        assert outputs.take(number) is not None and outputs.take(number) is None
        assert outputs.num_bytes <= 2 * 4 * TOKEN_BYTES
    assert encoder.encoded == [b"a", b"b", b"c", b"b"]  # c took the place of b
    assert (outputs.num_encoded, outputs.num_found) == (4, 2)
    assert set(answers.values()) == {""}


def test_pictures_that_wait_with_their_sequences_hold_up_further_ones_until_they_enter() -> None:
    answers = Answers()
    outputs = PictureOutputs(Encoder(), 2 * 4 * TOKEN_BYTES)
    ask(outputs, answers, *(order(n, bytes([n])) for n in range(1, 5)))
    run(outputs)
    assert list(answers) == [1, 2] and outputs.num_waiting == 2
    assert outputs.take(1) is not None
    run(outputs)
    assert list(answers) == [1, 2, 3]
    ask(outputs, answers, dropped=(2, 3))
    run(outputs)
    assert list(answers) == [1, 2, 3, 4] and not outputs.num_waiting


def test_a_known_picture_needs_no_room() -> None:
    answers = Answers()
    outputs = PictureOutputs(Encoder(), 4 * TOKEN_BYTES)
    ask(outputs, answers, order(1, b"a"), order(2, b"a"), order(3, b"b"))
    run(outputs)
    assert list(answers) == [1, 2]


def test_a_turn_has_so_many_bytes_of_pixels_or_one_picture() -> None:
    large, answers = MAX_BYTES_PER_TURN * 3, Answers()
    outputs = PictureOutputs(Encoder(), 1 << 20)
    ask(
        outputs,
        answers,
        order(1, b"a", large),
        order(2, b"b"),
        order(3, b"c"),
        order(4, b"d", large),
    )
    assert run(outputs) == 3
    assert list(answers) == [1, 2, 3, 4]


def test_one_that_fails_is_answered_with_why_and_the_others_are_encoded() -> None:
    answers = Answers()
    outputs = PictureOutputs(Encoder(), 1 << 20)
    ask(outputs, answers, order(1, b"x"), order(2, b"a", num_tokens=5), order(3, b"b"))
    run(outputs)
    assert answers == {2: "four tokens", 1: "the picture cannot be encoded: RuntimeError", 3: ""}
    assert outputs.take(1) is None and outputs.take(3) is not None


def test_what_was_dropped_or_forgotten_is_not_encoded() -> None:
    encoder, answers = Encoder(), Answers()
    outputs = PictureOutputs(encoder, 1 << 20)
    ask(outputs, answers, order(1, b"a"), order(2, b"b"))
    ask(outputs, answers, dropped=(1,))
    run(outputs)
    assert encoder.encoded == [b"b"] and list(answers) == [2]
    ask(outputs, answers, order(3, b"c"))
    outputs.drop_all()
    run(outputs)
    assert encoder.encoded == [b"b"] and outputs.take(2) is None


def entering(*pictures: PlacedPicture) -> NewSequence:
    tokens = torch.arange(12).int().numpy()
    return NewSequence(0, "r", tokens, 12, 0, tokens[:1], pictures=pictures)


def test_a_sequence_takes_one_output_for_all_places_of_a_picture() -> None:
    outputs = PictureOutputs(Encoder(), 1 << 20)
    ask(outputs, Answers(), order(1, b"a"), order(2, b"b"))
    run(outputs)
    places = PlacedPicture(0, 1), PlacedPicture(4, 2), PlacedPicture(8, 1)
    found = entering_pictures(entering(*places), outputs, "new_sequences[0]")
    assert found is not None and found.begins == (0, 4, 8) and found.ends == (4, 8, 12)
    assert [one.content_id for one in found.encoded] == [b"a", b"b", b"a"]
    assert entering_pictures(entering(), outputs, "n") is None


@pytest.mark.parametrize(
    ("places", "problem"),
    [
        ([(0, 9)], "preparation_id 9 is not ready"),
        ([(9, 1)], "9..13 is not after the one before and inside the prompt"),
        ([(2, 1), (5, 2)], "5..9 is not after the one before"),
        ([(2**31 - 1, 1)], "inside the prompt"),
    ],
)
def test_a_sequence_whose_pictures_do_not_fit_is_refused(
    places: list[tuple[int, int]], problem: str
) -> None:
    outputs = PictureOutputs(Encoder(), 1 << 20)
    ask(outputs, Answers(), order(1, b"a"), order(2, b"b"))
    run(outputs)
    sequence = entering(*(PlacedPicture(at, number) for at, number in places))
    with pytest.raises(BadStep, match=problem):
        entering_pictures(sequence, outputs, "new_sequences[0]")
    with pytest.raises(BadStep, match="encodes no pictures"):
        entering_pictures(sequence, None, "new_sequences[0]")
