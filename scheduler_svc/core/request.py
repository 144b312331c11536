"""What a caller asks of the scheduler, and the words for how it ends.

Everything here is plain data: token ids, never text; numbers, never a clock.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    EXPIRED = "expired"
    DEAD_END = "dead end"  # its own parameters left no token to go on with


class RefusalKind(Enum):
    """What would have to change for a refused request to be accepted."""

    INVALID = "invalid"  # the request itself
    DUPLICATE = "duplicate"  # its id: another live request has it
    NEVER_FITS = "never fits"  # the deployment: the KV cache is too small for it
    OVERLOADED = "overloaded"  # the moment: too much waits already
    EXPIRED = "expired"  # its deadline, which has passed


class Refused(Exception):
    """A request that cannot be accepted; nothing about it is kept."""

    def __init__(self, kind: RefusalKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how far to continue it.

    `sampling` is opaque here: it travels to the worker with the sequence. `client` and `handle` are
    opaque too: they come back with every token, so that the shell knows whom to send it to. Times
    are seconds of the one clock that the shell reads.
    """

    request_id: str
    prompt_token_ids: TokenIds
    max_tokens: int | None = None  # None: as many as the length limit allows; 0: the prompt alone
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling: object = None
    client: int = 0
    handle: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None  # when it ends, done or not
    priority: int = 0  # smaller is more urgent
    tenant: str = ""  # who shares with whom
    cache_salt: str = ""  # cached prefixes are found by requests of the same salt alone
    skip_prefix_cache: bool = False  # neither looks for a cached prefix nor leaves one
    fork_group: str = ""  # requests of the same prompt that compute it once
    # Positions of the prompt that the worker reports on when it computes them; none where equal.
    report_begin: int = 0
    report_end: int = 0
    # What a scheduler that is gone had made of it: it goes on behind that. None: it is new.
    output_token_ids: TokenIds | None = None
    resumed_by_client: bool = False  # who alone says so: no scheduler may ever have let it in

    @property
    def num_tokens(self) -> int:
        """Of its prompt and of its output so far."""
        output = self.output_token_ids
        return len(self.prompt_token_ids) + (0 if output is None else len(output))

    @property
    def is_prompt_only(self) -> bool:
        """Whether nothing is sampled: it ends when its prompt is computed."""
        return self.max_tokens == 0
