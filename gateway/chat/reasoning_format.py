"""The format in which a model family writes its reasoning. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around reasoning, and when an answer begins with it."""

    name: str
    is_in: Callable[[str], bool] | None = None  # whether a chat template writes reasoning so
    opening: str = OPEN
    closing: str = CLOSE
    label: str = ""  # plain text next to the opening, which belongs to it
    begins_inside: bool = False  # always, opened or not
    # Messages of channels, as harmony's: they are parsed as calls are, and end by other rules.
    is_in_channels: bool = False

    @property
    def head(self) -> str:
        """The whole text that opens the reasoning."""
        return self.opening + self.label

    def is_open_at_end(self, prompt: str) -> bool:
        """True if the prompt ends with what opens the reasoning."""
        return prompt.rstrip().endswith(self.head)

    def is_closed_at_end(self, prompt: str) -> bool:
        """True if the prompt ends with reasoning that is over."""
        return prompt.rstrip().endswith(self.closing)
