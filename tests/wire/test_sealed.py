"""Frames that were lost, repeated, swapped or changed are found, whichever bit it is."""

import pytest

from pagewire.v1 import scheduler_pb2, worker_pb2
from wire.sealed import CHECKSUM_FIELD, SEQUENCE_FIELD, BadFrame, SealCheck, Sealer

KINDS = (
    scheduler_pb2.SessionRequest,
    scheduler_pb2.SessionResponse,
    worker_pb2.AttachRequest,
    worker_pb2.AttachResponse,
)
FRAMES = [
    scheduler_pb2.SessionResponse(handles=bytes(8), token_ids=bytes([number] * 8))
    for number in range(4)
]


def sealed() -> list[bytes]:
    sealer = Sealer()
    return [sealer.seal_message(frame) for frame in FRAMES]


def check(frames: list[bytes]) -> None:
    seal_check = SealCheck()
    for frame in frames:
        seal_check.check(frame)


@pytest.mark.parametrize("kind", KINDS)
def test_the_seal_is_the_messages_last_two_fields(kind: type) -> None:
    fields = kind.DESCRIPTOR.fields_by_number  # type: ignore[attr-defined]
    assert fields[SEQUENCE_FIELD].name == "sequence"
    assert fields[CHECKSUM_FIELD].name == "checksum" and max(fields) == CHECKSUM_FIELD
    read = kind.FromString(Sealer().seal(b""))  # type: ignore[attr-defined]
    assert read.sequence == 1 and read.HasField("checksum")


def test_a_message_is_read_as_it_was_and_can_be_written_again() -> None:
    for frame, message in zip(sealed(), FRAMES, strict=True):
        read = scheduler_pb2.SessionResponse.FromString(frame)
        assert read.token_ids == message.token_ids
        assert read.SerializeToString() == frame, "a relay may parse what it passes on"


def test_frames_in_order_pass() -> None:
    check(sealed())
    check([frame.SerializeToString() for frame in FRAMES])  # of a peer that does not seal


@pytest.mark.parametrize(
    "order",
    [(0, 2), (1, 2), (0, 1, 1), (0, 0), (0, 2, 1, 3), (1, 0)],
)
def test_a_gap_a_repetition_and_another_order_are_found(order: tuple[int, ...]) -> None:
    frames = sealed()
    with pytest.raises(BadFrame):
        check([frames[number] for number in order])


def test_every_bit_of_every_frame_counts() -> None:
    frames = sealed()
    for number, frame in enumerate(frames):
        for bit in range(8 * len(frame)):
            changed = bytearray(frame)
            changed[bit // 8] ^= 1 << bit % 8
            with pytest.raises(BadFrame):
                check([*frames[:number], bytes(changed), *frames[number + 1 :], frames[0]])


def test_a_frame_cut_short_or_with_more_at_its_end_is_found() -> None:
    first, second = sealed()[:2]
    for frame in (second[:-1], second[:5], b"", second + b"\0"):
        with pytest.raises(BadFrame):
            check([first, frame])


def test_frames_with_and_without_seals_do_not_mix() -> None:
    first, second = sealed()[:2]
    plain = FRAMES[1].SerializeToString()
    for frames in ([first, plain], [plain, first], [plain, second]):
        with pytest.raises(BadFrame):
            check(frames)


def test_a_frame_of_a_peer_without_seals_may_end_like_one() -> None:
    """One of 65,536 does, by the bytes of its last field."""
    seal = bytes([SEQUENCE_FIELD << 3 | 5, 2, 0, 0, 0, CHECKSUM_FIELD << 3 | 5, 1, 2, 3, 4])
    check([b"hello", b"a step" + seal, b"another"])
    with pytest.raises(BadFrame, match="changed on the way"):
        check([b"a step" + seal])  # a first frame tells whether there are seals
    with pytest.raises(BadFrame, match="changed on the way"):
        check([*sealed()[:1], b"a step" + seal])


def test_numbers_wrap_around() -> None:
    sealer, seal_check = Sealer(), SealCheck()
    seal_check.check(sealer.seal(b""))
    sealer._num_sealed = seal_check._num_checked = (1 << 32) - 2
    for _ in range(3):
        seal_check.check(sealer.seal(b""))
    assert sealer._num_sealed == 1
