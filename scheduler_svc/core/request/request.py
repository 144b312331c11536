"""Requests as the scheduler sees them, why they are refused, and why they end.

Everything here is plain data: token ids, never text; numbers, never a clock.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request.requirement import GRAMMAR, Requirements
from scheduler_svc.core.request.session_hint import SessionHint

TokenIds = NDArray[np.int32]
MAX_CONTENT_ID = (1 << 128) - 1
_CONTENT_ID_BYTES = 16


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    EXPIRED = "expired"
    DEAD_END = "dead end"  # its own parameters left no token to sample
    POISON = "poison"  # process after process died where it was computed


class RefusalKind(Enum):
    """Why a request was refused, by what would have to change."""

    INVALID = "invalid"  # the request itself
    DUPLICATE = "duplicate"  # its id: another live request has the same
    NEVER_FITS = "never fits"  # the deployment: its KV cache is too small
    OVERLOADED = "overloaded"  # the load: the queue is full
    EXPIRED = "expired"  # its deadline: it has passed


class Refused(Exception):
    """Raised when a request is not accepted; no state of it is kept."""

    def __init__(self, kind: RefusalKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Extra:
    """A picture among the tokens: the positions of its placeholders, and what it shows."""

    begin: int  # position of its first placeholder
    end: int  # position after its last one
    content_id: int  # 128 bits that tell its content from all others

    def to_bytes(self) -> bytes:
        """The fields as bytes, always of the same length."""
        place = self.begin.to_bytes(8, "little") + self.end.to_bytes(8, "little")
        return place + self.content_id.to_bytes(_CONTENT_ID_BYTES, "little")


Extras = tuple[Extra, ...]  # in order of position; they do not overlap


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how far to continue it.

    `sampling` is opaque here: it goes to the worker with the sequence. `client` and `handle` are
    opaque too: they come back with every token, for the shell to address it. Times are seconds of
    the one clock that the shell reads.
    """

    request_id: str
    prompt_token_ids: TokenIds
    max_tokens: int | None = None  # None: up to the length limit; 0: the prompt alone
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling: object = None
    client: int = 0
    handle: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None  # the request ends at this time, finished or not
    priority: int = 0  # smaller is more urgent
    tenant: str = ""  # the account for fair share and limits
    cache_salt: str = ""  # cached prefixes are shared only within one salt
    adapter_id: str = ""  # of the adapter that computes it; empty: the model alone
    extras: Extras = ()  # the pictures of its prompt
    skip_prefix_cache: bool = False  # neither reads nor fills the prefix cache
    skip_speculation: bool = False  # no tokens are drafted for it
    fork_group: str = ""  # requests of one prompt, which is computed once
    # Range of prompt positions with outputs (log probabilities, hidden states); empty when equal.
    prompt_output_begin: int = 0
    prompt_output_end: int = 0
    # Output generated before, after which this request continues. None: it is new.
    output_token_ids: TokenIds | None = None
    resumed_by_client: bool = False  # by the client's word; maybe never accepted
    requirements: Requirements = ()  # which the worker prepares before it may enter a slot
    pictures: object = None  # of its extras, opaque: they go to the worker that encodes them
    num_deaths: int = 0  # of other processes, while it ran there; it begins as a suspect
    session: SessionHint | None = None  # None: its client says nothing of one

    @property
    def takes_drafts(self) -> bool:
        """True if tokens may be drafted for it: the masks of a grammar follow tokens one by one."""
        return not (self.skip_speculation or GRAMMAR in self.requirements)

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens and output tokens so far."""
        output = self.output_token_ids
        return len(self.prompt_token_ids) + (0 if output is None else len(output))

    @property
    def is_prompt_only(self) -> bool:
        """True if nothing is sampled: the request ends when its prompt is computed."""
        return self.max_tokens == 0
