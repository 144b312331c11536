"""A vector as Cohere's embedding types write it. Pure.

Vectors have length 1, so each number is between -1 and 1: integers are these times 127, rounded,
and bits their signs, eight to a byte, the first in the highest place.
"""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.http.cohere.embed_body import EmbeddingType
from wire.logprobs import FLOAT32

SCALE = 127
SIGN = 128  # what a signed byte is less than the same byte without a sign


def written(kind: EmbeddingType, vector: NDArray[np.float32]) -> list[float] | list[int] | str:
    """One vector in one of the forms."""
    if kind == "base64":
        return base64.b64encode(vector.astype(FLOAT32).tobytes()).decode()
    numbers: Any = vector
    if kind in ("int8", "uint8"):
        numbers = np.rint(vector * SCALE).astype(np.int16)
    elif kind in ("binary", "ubinary"):
        numbers = np.packbits(vector > 0).astype(np.int16)
    if kind == "uint8":
        numbers = numbers + SIGN
    elif kind == "binary":
        numbers = numbers - SIGN
    found: list[float] = numbers.tolist()
    return found


def by_type(
    kinds: Sequence[EmbeddingType], vectors: Sequence[NDArray[np.float32]]
) -> dict[str, list[Any]]:
    """All vectors in each of the forms."""
    return {kind: [written(kind, vector) for vector in vectors] for kind in kinds}
