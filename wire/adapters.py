"""Adapters as services name them: LoRA weights that a request computes with, over the model's."""

from dataclasses import asdict, dataclass
from typing import Protocol

MAX_NAME_BYTES = 200  # with its digest a name fits into what the scheduler takes as an id
MAX_PATH_BYTES = 4096


class AdapterMessage(Protocol):
    """An adapter as services send it."""

    name: str
    path: str
    adapter_id: str


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter that a worker has read: the model name of requests, and where it lies."""

    name: str
    path: str  # a folder of the workers' hosts
    adapter_id: str  # tells its content from that of all others, under this name or another

    @classmethod
    def from_message(cls, message: AdapterMessage) -> "AdapterSource":
        """The adapter of a message."""
        return cls(message.name, message.path, message.adapter_id)

    def fields(self) -> dict[str, str]:
        """The fields of its message."""
        return asdict(self)


def adapter_id(name: str, digest: str) -> str:
    """The id of an adapter with this name and this digest of its content."""
    return f"{name}@{digest}"


def name_problem(name: str) -> str | None:
    """Why an adapter cannot have this name; None when it can."""
    if not name.strip() or not name.isprintable():
        return "is empty or not printable"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"is longer than {MAX_NAME_BYTES} bytes"
    return None
