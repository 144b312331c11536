"""Pictures of requests, read in another process: limits by name, a death that hurts no other."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gateway.callers.picture_limits import PictureLimits
from gateway.chat.pictures import PictureSource
from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.tokens.pictures.reader import LIMITS, PictureReader
from tests.gateway.tokens.pictures.files import SETTINGS, file_of, picture, png_of_size


@pytest.fixture
def reader() -> Iterator[PictureReader]:
    made = PictureReader(SETTINGS, PictureLimits(3, 1 << 20, 1 << 16))
    yield made
    made.close()


def source(content: bytes, place: str = "messages[0].content[1]") -> PictureSource:
    return PictureSource(place, "no pictures", content=content)


async def problem_of(reader: PictureReader, *contents: bytes) -> str:
    with pytest.raises(RequestError) as error:
        await reader.prepare([source(content, f"p{n}") for n, content in enumerate(contents)])
    assert error.value.kind is ErrorKind.INVALID
    return f"{error.value.field}: {error.value}"


async def test_equal_pictures_have_one_content_and_others_of_one_size_have_another(
    reader: PictureReader,
) -> None:
    one, other = (picture(16, 16, seed) for seed in (1, 2))
    contents = file_of(one), file_of(other), file_of(one, "WEBP", lossless=True)
    first, second, third = await reader.prepare([source(content) for content in contents])
    assert first.content_id == third.content_id != second.content_id
    assert len(first.content_id) == 16 and first.num_tokens == 4


async def test_limits_are_told_by_their_options_and_places(reader: PictureReader) -> None:
    good = file_of(picture(16, 16))
    assert "p3" in await problem_of(reader, *[good] * 4)
    assert "--max-pictures is 3" in await problem_of(reader, *[good] * 4)
    assert "more than 1 MiB, --max-picture-mib" in await problem_of(reader, bytes((1 << 20) + 1))
    problem = await problem_of(reader, good, png_of_size(257, 256))
    assert problem.startswith("p1") and "--max-picture-pixels is 65536" in problem


async def test_a_child_that_needs_too_much_memory_dies_alone() -> None:
    tight = replace(LIMITS, memory_mib=64)
    reader = PictureReader(SETTINGS, PictureLimits(3, 1 << 24, 1 << 28), work_limits=tight)
    try:
        large = file_of(picture(8, 8).resize((9_000, 9_000)), "PNG")
        assert "needs more than 64 MiB of memory" in await problem_of(reader, large)
        assert await reader.prepare([source(file_of(picture(16, 16)))])
    finally:
        reader.close()


async def test_a_process_that_was_killed_is_replaced(reader: PictureReader) -> None:
    content = file_of(picture(16, 16))
    first = await reader.prepare([source(content)])
    process = reader._process
    assert process is not None
    os.kill(process.process.pid, signal.SIGKILL)
    process.process.wait()
    assert await reader.prepare([source(content)]) == first
    assert reader._process is not process
