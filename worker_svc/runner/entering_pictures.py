"""Takes the pictures of a sequence that enters a slot from what was encoded ahead of it."""

from worker_svc.attention.pictures import (
    EncodedPicture,
    Positions,
    SequencePictures,
    rotations_of_prompt,
)
from worker_svc.protocol.step import BadStep, NewSequence
from worker_svc.runner.picture_outputs import PictureOutputs


def entering_pictures(
    sequence: NewSequence, outputs: PictureOutputs | None, name: str
) -> SequencePictures | None:
    """The pictures of a sequence that enters; None: it has none. Raises BadStep."""
    if not sequence.pictures:
        return None
    at = f"{name}.pictures"
    if outputs is None:
        raise BadStep(at, "this worker encodes no pictures")
    taken: dict[int, EncodedPicture] = {}
    begins: list[int] = []
    ends: list[int] = []
    encoded: list[EncodedPicture] = []
    for placed in sequence.pictures:
        number = placed.preparation_id
        found = taken.get(number) or outputs.take(number)
        if found is None:
            raise BadStep(at, f"preparation_id {number} is not ready")
        taken[number] = found
        begin, end = placed.position, placed.position + found.num_tokens
        if begin < (ends[-1] if ends else 0) or end > sequence.num_prompt_tokens:
            raise BadStep(at, f"{begin}..{end} is not after the one before and inside the prompt")
        begins.append(begin)
        ends.append(end)
        encoded.append(found)
    rotations = _rotations(sequence.num_prompt_tokens, begins, encoded)
    return SequencePictures(tuple(begins), tuple(ends), tuple(encoded), rotations)


def _rotations(
    num_tokens: int, begins: list[int], encoded: list[EncodedPicture]
) -> Positions | None:
    grids = [one.grid for one in encoded if one.grid is not None]
    return rotations_of_prompt(num_tokens, begins, grids) if grids else None
