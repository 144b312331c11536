"""Outbox of one client: tokens and ends that its stream has not taken yet.

The engine puts, the client's stream takes. A slow client costs memory but never delays a step: its
tokens merge here until it takes them, and there are never more than its requests may generate.
"""

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core import Finished
from wire.logprobs import LogprobColumns, join
from wire.prompt_outputs import PromptOutput


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """A request's end, with the gRPC status code of its failure (0: it did not fail)."""

    finished: Finished
    status_code: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """The admission of a request: it left the queue."""

    handle: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """Everything that arrived since the last take."""

    handles: NDArray[np.uint32]
    token_ids: NDArray[np.int32]
    ended: list[RequestEnd]
    admitted: list[Admitted]
    logprobs: LogprobColumns | None  # rows index token_ids
    prompt_outputs: list[PromptOutput]  # by handle; sent before the tokens


_NO_HANDLES: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
_NO_TOKENS: NDArray[np.int32] = np.empty(0, dtype=np.int32)


class Outbox:
    """One producer and one consumer on the same event loop."""

    def __init__(self) -> None:
        self._handles: list[NDArray[np.uint32]] = []
        self._token_ids: list[NDArray[np.int32]] = []
        self._logprobs: list[LogprobColumns | None] = []
        self._prompt_outputs: list[PromptOutput] = []
        self._ended: list[RequestEnd] = []
        self._admitted: list[Admitted] = []
        self._filled = asyncio.Event()
        self.is_closed = False

    def close(self) -> None:
        """Wakes the consumer: nothing more comes."""
        self.is_closed = True
        self._filled.set()

    def put_admission(self, admission: Admitted) -> None:
        """Adds an admission; sent before the request's first token, as soon as it is taken."""
        self._admitted.append(admission)
        self._filled.set()  # its gateway must know that it runs, should this process die

    def put_tokens(
        self,
        handles: NDArray[np.uint32],
        token_ids: NDArray[np.int32],
        logprobs: LogprobColumns | None = None,
    ) -> None:
        """Adds one step's tokens of this client, with requested log probabilities."""
        self._handles.append(handles)
        self._token_ids.append(token_ids)
        self._logprobs.append(logprobs)
        self._filled.set()

    def put_prompt_output(self, prompt_output: PromptOutput) -> None:
        """Adds prompt outputs of one request, named by its handle."""
        self._prompt_outputs.append(prompt_output)
        self._filled.set()

    def put_end(self, ended: RequestEnd) -> None:
        """Adds the end of one request, after all its tokens."""
        self._ended.append(ended)
        self._filled.set()

    async def take(self) -> Parcel:
        """Removes and returns all that was added; waits until there is something."""
        await self._filled.wait()
        self._filled.clear()
        handles, token_ids = self._handles, self._token_ids
        ended, admitted, logprobs = self._ended, self._admitted, self._logprobs
        self._handles, self._token_ids, self._logprobs = [], [], []
        prompt_outputs, self._prompt_outputs = self._prompt_outputs, []
        self._ended, self._admitted = [], []
        if len(handles) == 1:  # one step since the last take: the usual case
            return Parcel(handles[0], token_ids[0], ended, admitted, logprobs[0], prompt_outputs)
        return Parcel(
            np.concatenate([_NO_HANDLES, *handles]),
            np.concatenate([_NO_TOKENS, *token_ids]),
            ended,
            admitted,
            join(zip(map(len, handles), logprobs, strict=True)),
            prompt_outputs,
        )
