"""Pictures of conversations: a turn's text has a mark where each stands, which no client can know.

So turns are joined, sorted and rendered as text alone, and the marks come out where the pictures
belong. A gateway whose model takes no pictures opens nothing here, and they are refused.
"""

import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

NO_PICTURES = "the model reads text only"
_MARK = re.compile(r"\n?(<picture-[0-9a-f]{32}>)\n?")


def _new_mark() -> str:
    return f"<picture-{secrets.token_hex(16)}>"


@dataclass(frozen=True, slots=True)
class PictureSource:
    """A picture as a request has it: at a URL, or as the content of a file."""

    place: str  # in the request, for errors
    problem: str  # why it is refused where the model takes none
    url: str = ""  # data:, http: or https:
    content: bytes = b""
    mark: str = field(default_factory=_new_mark)


class GivenPictures:
    """The pictures of one request, by their marks."""

    def __init__(self) -> None:
        self._sources: dict[str, PictureSource] = {}

    def add(self, source: PictureSource) -> str:
        """Takes in a picture; returns the text that stands for it in its turn."""
        self._sources[source.mark] = source
        return source.mark

    def in_text(self, text: str) -> list[PictureSource]:
        """The pictures whose marks a text has, in its order."""
        if not self._sources:
            return []
        found = (self._sources.get(match[1]) for match in _MARK.finditer(text))
        return [source for source in found if source is not None]


_GIVEN: ContextVar[GivenPictures | None] = ContextVar("GIVEN_PICTURES", default=None)


@contextmanager
def taken() -> Iterator[None]:
    """Takes the pictures of the current task's request, and of tasks that it starts."""
    token = _GIVEN.set(GivenPictures())
    try:
        yield
    finally:
        _GIVEN.reset(token)


def given_pictures() -> GivenPictures | None:
    """The pictures of the current task's request; None: none are taken."""
    return _GIVEN.get()


def without_breaks(content: str) -> str:
    """A turn's text without the line breaks by which marks were joined to their neighbours."""
    return _MARK.sub(r"\1", content) if "<picture-" in content else content


def pictures_of(contents: Iterable[str | None]) -> list[PictureSource]:
    """The pictures of some turns' texts, in order."""
    given = given_pictures()
    if given is None:
        return []
    return [source for text in contents if text for source in given.in_text(text)]
