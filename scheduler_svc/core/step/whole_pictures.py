"""Chunks that cut no picture, for models whose pictures see all their tokens, later ones too."""

from scheduler_svc.core.request.request import Extras


def whole_chunk(extras: Extras, begin: int, chunk: int, most: int) -> int:
    """The tokens from `begin` on, about `chunk` of them, that end in no picture.

    The chunk ends before a picture that it would cut. If it begins there, it has all of that
    picture, provided that these are `most` tokens or fewer, and else none.
    """
    end = begin + chunk
    for extra in extras:
        if extra.begin < end < extra.end:
            if extra.begin > begin:
                return extra.begin - begin
            return extra.end - begin if extra.end - begin <= most else 0
    return chunk
