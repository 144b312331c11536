"""The format in which a model family writes tool calls. Pure."""

import secrets
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from gateway.chat.calls import Calls
from gateway.chat.source import Source, Steps
from gateway.structure.calls import CallWriting

Parse = Callable[[Source, Calls], Steps[None]]
IsCall = Callable[[Source, int, str, frozenset[str]], Steps[bool]]

_ALPHANUMERIC = string.ascii_letters + string.digits


def long_id() -> str:
    """An id in OpenAI's form."""
    return f"call_{uuid.uuid4().hex[:24]}"


def short_id() -> str:
    """Nine letters and digits: Mistral's templates accept no other ids."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """The format of one model family."""

    name: str
    parse: Parse
    is_in: Callable[[str], bool] | None = None  # whether a chat template writes calls so
    shown_tokens: tuple[str, ...] = ()  # special tokens that the parser must see
    new_id: Callable[[], str] = long_id
    writing: CallWriting | None = None  # None: no grammar holds calls of this format
    openings: tuple[str, ...] = ()  # by which calls may begin within reasoning
    # Whether a call of one of some functions begins with an opening at an offset.
    is_call: IsCall | None = None
