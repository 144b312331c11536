"""The way in which layers of one kind attend: the keys that a query sees, and their weights.

It knows neither heads nor tensors, so that kinds can be compared and serve as keys.
"""

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """A query sees the keys up to its own, or of these the newest ones alone."""

    scale: float  # of the products of queries and keys
    window: int | None = None  # the keys that a query sees, its own included; None: all
    # A query sees the keys of its own chunk: positions with one quotient by this number.
    chunk: int | None = None
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    has_sinks: bool = False  # each head has a score that takes its share, and has no value

    @property
    def sees_all(self) -> bool:
        """True if a query sees every key up to its own."""
        return self.window is None and self.chunk is None

    @property
    def is_softmax(self) -> bool:
        """True if the weights are the softmax of the scaled products."""
        return self.softcap is None and not self.has_sinks

    @property
    def is_plain(self) -> bool:
        """True if there is nothing but a scale."""
        return self.sees_all and self.is_softmax

    def first_key(self, position: int) -> int:
        """The position of the first key that a query at this position sees."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)

    def hides(self, queries: Tensor, keys: Tensor) -> Tensor:
        """True where a query position must not see a key position; the two are broadcast."""
        hidden = keys > queries
        if self.window is not None:
            hidden = hidden | (keys <= queries - self.window)
        if self.chunk is not None:
            hidden = hidden | (keys // self.chunk != queries // self.chunk)
        return hidden

    def within(self, max_model_len: int) -> "AttentionKind":
        """This kind for contexts of up to this length, in which a longer window hides nothing."""
        if self.window is None or self.window < max_model_len:
            return self
        return replace(self, window=None)

    def __str__(self) -> str:
        parts = [
            f"window {self.window}" if self.window else "",
            f"chunk {self.chunk}" if self.chunk else "",
            f"softcap {self.softcap:g}" if self.softcap else "",
            "sinks" if self.has_sinks else "",
        ]
        return ", ".join(part for part in parts if part) or "full attention"
