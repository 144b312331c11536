"""Prompt outputs of a range of positions, on the wire from worker to gateway."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wire.columns import BadColumn
from wire.logprobs import FLOAT32, LogprobColumns, Packed


class PackedPromptOutput(Protocol):
    """The message with one prompt output."""

    owner: int
    begin: int
    count: int
    hidden_sum: bytes
    not_finite: bool

    @property
    def logprobs(self) -> Packed: ...


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """Outputs of positions `begin` to (not including) `end` of a prompt, by slot or handle."""

    owner: int
    begin: int
    end: int
    logprobs: LogprobColumns | None = None  # of the token after each position
    hidden_sum: NDArray[np.float32] | None = None  # [hidden], summed over the positions
    is_finite: bool = True

    def pack(self) -> dict[str, Any]:
        """The fields of the message except `logprobs`, which is a message of its own."""
        return {
            "owner": self.owner,
            "begin": self.begin,
            "count": self.end - self.begin,
            "hidden_sum": b""
            if self.hidden_sum is None
            else self.hidden_sum.astype(FLOAT32).tobytes(),
            "not_finite": not self.is_finite,
        }

    @classmethod
    def unpack(cls, message: PackedPromptOutput) -> "PromptOutput":
        """The prompt output of a message. Raises BadColumn when its parts do not match."""
        end = message.begin + message.count
        if message.not_finite:
            return cls(message.owner, message.begin, end, is_finite=False)
        logprobs = LogprobColumns.unpack(message.logprobs, message.count)
        num_logprobs = 0 if logprobs is None else len(logprobs)
        if len(message.hidden_sum) % FLOAT32.itemsize:
            raise BadColumn(f"hidden_sum: {len(message.hidden_sum)} bytes are no column of float32")
        hidden = np.frombuffer(message.hidden_sum, FLOAT32) if message.hidden_sum else None
        if not message.count or (num_logprobs, hidden is None) not in (
            (message.count, True),
            (0, False),
        ):
            raise BadColumn(
                f"prompt_outputs: {num_logprobs} logprobs and {len(message.hidden_sum)} bytes of "
                f"hidden states for {message.count} positions"
            )
        return cls(message.owner, message.begin, end, logprobs, hidden)


class HiddenMean:
    """The mean of hidden states that arrive as sums over parts of a prompt."""

    def __init__(self) -> None:
        self._sum: NDArray[np.float64] | None = None
        self._count = 0

    def add(self, prompt_output: PromptOutput) -> None:
        """Adds a part. Summed in float64, so that the partition hardly matters."""
        assert prompt_output.hidden_sum is not None
        part = prompt_output.hidden_sum.astype(np.float64)
        self._sum = part if self._sum is None else self._sum + part
        self._count += prompt_output.end - prompt_output.begin

    def value(self) -> NDArray[np.float64] | None:
        """[hidden]; None when there was no part."""
        return None if self._sum is None else self._sum / self._count
