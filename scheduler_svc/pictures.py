"""Pictures of prompts: what the core knows of them, and what travels on to the worker.

The core knows where a picture stands and what tells it from others. Its pixels are opaque to it;
they stay with the request, since they go to each worker that the request comes to.
"""

from dataclasses import dataclass

from pagewire.v1 import scheduler_pb2, types_pb2, worker_pb2
from scheduler_svc.core import EnteringSequence, Extra, Preparation, Requirement, RequirementKind

CONTENT_ID_BYTES = 16
MAX_PICTURES = 256


class BadPicture(ValueError):
    """Raised for pictures that a request cannot have; the message names the field."""


@dataclass(frozen=True, slots=True)
class RequestPictures:
    """The pixels of a request's pictures, by the key of the requirement that stands for each."""

    pixels: dict[str, types_pb2.PicturePixels]
    num_tokens: dict[str, int]  # placeholders of each


@dataclass(frozen=True, slots=True)
class ReadPictures:
    """The pictures of a request, as the core takes them."""

    extras: tuple[Extra, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    payload: RequestPictures | None = None


def read_pictures(
    submitted: scheduler_pb2.Submit | scheduler_pb2.SchedulerServiceGenerateRequest,
) -> ReadPictures:
    """The pictures of a request. Raises BadPicture; where they stand is checked by the core."""
    if not submitted.pictures:
        return ReadPictures()
    if (count := len(submitted.pictures)) > MAX_PICTURES:
        raise BadPicture(f"pictures has {count} entries, at most {MAX_PICTURES}")
    extras, payload = [], RequestPictures({}, {})
    for index, picture in enumerate(submitted.pictures):
        content_id, name = picture.content_id, f"pictures[{index}]"
        if len(content_id) != CONTENT_ID_BYTES:
            raise BadPicture(
                f"{name}.content_id has {len(content_id)} bytes, must have {CONTENT_ID_BYTES}"
            )
        key, end = content_id.hex(), picture.position + picture.num_tokens
        extras.append(Extra(picture.position, end, int.from_bytes(content_id, "little")))
        if picture.HasField("pixels"):
            payload.pixels.setdefault(key, picture.pixels)
        elif key not in payload.pixels:
            raise BadPicture(f"{name}.pixels is absent, and no picture before it has them")
        if payload.num_tokens.setdefault(key, picture.num_tokens) != picture.num_tokens:
            raise BadPicture(f"{name}.num_tokens differs from that of an equal picture before it")
    requirements = [Requirement(RequirementKind.ENCODER_OUTPUT, key) for key in payload.pixels]
    return ReadPictures(tuple(extras), tuple(requirements), payload)


def to_picture_preparation(wanted: Preparation) -> worker_pb2.PicturePreparation:
    """A picture to encode, as the worker's message."""
    key, payload = wanted.requirement.key, wanted.request.pictures
    assert isinstance(payload, RequestPictures)
    return worker_pb2.PicturePreparation(
        preparation_id=wanted.preparation_id,
        content_id=bytes.fromhex(key),
        num_tokens=payload.num_tokens[key],
        pixels=payload.pixels[key],
    )


def to_placed_pictures(new: EnteringSequence) -> list[worker_pb2.PlacedPicture]:
    """The pictures of a sequence that enters a slot, with the preparations that it uses up."""
    placed = []
    for extra in new.request.extras:
        key = extra.content_id.to_bytes(CONTENT_ID_BYTES, "little").hex()
        required = Requirement(RequirementKind.ENCODER_OUTPUT, key)
        placed.append(
            worker_pb2.PlacedPicture(
                position=extra.begin, preparation_id=new.preparations.get(required, 0)
            )
        )
    return placed
