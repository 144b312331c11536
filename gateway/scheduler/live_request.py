"""A live request as the gateway keeps it: enough to deliver its output and to submit it again.

Prompt and output so far are all that another scheduler needs to continue.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.errors.request_errors import RequestError
from gateway.request.generation import Finish, PrefixReuse, PromptPooling, SamplingParams, Standing
from gateway.text.logprobs import RawLogprobs
from gateway.tokens.placeholders import PictureInPrompt
from wire.adapters import AdapterSource
from wire.deaths import MAX_DEATHS, MAX_DEATHS_IN_ALL, PeerLoss
from wire.prompt_outputs import PromptOutput

MOST_TOLD_LOSSES = 16


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as submitted to the scheduler."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    standing: Standing
    reuse: PrefixReuse
    pooling: PromptPooling | None = None
    output_token_ids: tuple[int, ...] = ()  # from an earlier attempt
    num_deaths: int = 0  # of schedulers and gateways in a row, while it ran there without a token
    adapter: AdapterSource | None = None  # that it computes with
    pictures: tuple[PictureInPrompt, ...] = ()  # of the prompt
    was_accepted: bool = False  # its output so far is that of requests that this gateway had


class TokenArrival(NamedTuple):  # one per message: a frozen dataclass takes three times as long
    """New tokens, and the end of the output after the last ones."""

    token_ids: list[int]
    logprobs: Sequence[RawLogprobs]  # one per token, if requested
    end: Finish | None
    prompt_outputs: Sequence[PromptOutput] = ()  # before the tokens


class LiveRequest:
    """A submitted request as its reader sees it: tokens, then an end.

    Tokens that arrive faster than they are read are buffered, so a slow reader wakes up less often
    and delays no other request. max_tokens bounds the buffer.
    """

    __slots__ = (
        "_did_run",
        "_end",
        "_is_woken",
        "_logprobs",
        "_loop",
        "_prompt_outputs",
        "_token_ids",
        "_unjudged",
        "_waiter",
        "admitted_s",
        "first_token_s",
        "handle",
        "has_delivered",
        "is_new",
        "is_running",
        "is_submitted",
        "losses_s",
        "lost_s",
        "num_cached_tokens",
        "num_deaths",
        "num_deaths_in_all",
        "num_losses",
        "output_token_ids",
        "submission",
        "submitted_s",
    )

    def __init__(self, handle: int, submission: Submission, now_s: float = 0.0) -> None:
        self.handle = handle
        self.submission = submission
        self.submitted_s = now_s
        self.admitted_s: float | None = None  # for the first time
        self.first_token_s: float | None = None  # when it came, read or not
        self.num_cached_tokens = 0  # known with the first token
        self.output_token_ids = list(submission.output_token_ids)  # read or not
        # After the loss of the stream: since when, how many schedulers in a row were lost without a
        # token, and whether it was submitted again. A loss is judged when a scheduler answers.
        self.lost_s: float | None = None
        self.num_losses = 0
        self._unjudged: PeerLoss | None = None
        self._did_run = False  # when it was lost
        self.losses_s: list[float] = []  # the last ones, for its trace
        self.is_submitted = True
        self.is_new = False  # no scheduler has taken it: it is held until there is one
        self.is_running = False  # the scheduler that has it has admitted it
        self.num_deaths = self.num_deaths_in_all = submission.num_deaths
        self._is_woken = False
        self.has_delivered = False  # whether its reader has received anything
        self._loop = asyncio.get_running_loop()  # asking for it again is a system call
        self._token_ids: list[int] = []
        self._logprobs: list[RawLogprobs] = []
        self._prompt_outputs: list[PromptOutput] = []
        self._end: Finish | RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def receive(self) -> TokenArrival:
        """Returns everything since the last call, once wake() was called. For one reader.

        Raises RequestError when the request was refused or failed, after tokens that arrived
        before.
        """
        # Not by the tokens: those that came while the last ones were written may have to gather.
        if not self._is_woken and self._end is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        self._is_woken, self.has_delivered = False, True
        token_ids, self._token_ids = self._token_ids, []
        logprobs: Sequence[RawLogprobs] = ()
        prompt_outputs: Sequence[PromptOutput] = ()
        if self._logprobs:
            logprobs, self._logprobs = self._logprobs, []
        if self._prompt_outputs:
            prompt_outputs, self._prompt_outputs = self._prompt_outputs, []
        if isinstance(self._end, RequestError):
            if not token_ids:
                raise self._end
            return TokenArrival(token_ids, logprobs, None, prompt_outputs)
        return TokenArrival(token_ids, logprobs, self._end, prompt_outputs)

    def add(self, token_id: int, logprobs: RawLogprobs | None) -> None:
        """Adds a token; call wake() afterwards."""
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()
        self._token_ids.append(token_id)
        self.output_token_ids.append(token_id)
        self.is_running, self.is_new, self.num_deaths = True, False, 0
        if self.lost_s is not None:  # the new scheduler continues it
            self.lost_s, self.num_losses = None, 0
        if logprobs is not None:
            self._logprobs.append(logprobs)

    def admit(self, num_cached_tokens: int) -> None:
        """Records that the scheduler computes it.

        The reader of an output that a gateway died at hears of it at once: its client must know
        whether it ran, should this gateway die.
        """
        self.is_running, self.is_new = True, False
        if self.lost_s is not None and not self.num_losses:  # it was held, and waits no more
            self.lost_s = None
        if self.admitted_s is None:
            self.admitted_s = time.monotonic()
        if not self.output_token_ids:
            self.num_cached_tokens = num_cached_tokens
        if self.submission.num_deaths and self.submission.output_token_ids:
            self.wake()

    def add_prompt_output(self, prompt_output: PromptOutput) -> None:
        """Adds prompt outputs, which arrive before the first token and the end."""
        self._prompt_outputs.append(prompt_output)

    def end(self, how: Finish | RequestError) -> None:
        """Adds the end; call wake() afterwards."""
        self._end = how

    def wake(self) -> None:
        """Wakes the reader; call it once per step, not once per token."""
        self._is_woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def hold(self, now_s: float) -> None:
        """Keeps a new request for the next scheduler: the one there is takes no more."""
        self.is_new, self.is_submitted = True, False
        self.lost_s = now_s if self.lost_s is None else self.lost_s

    @property
    def queue_s(self) -> float | None:
        """Seconds from submission until a scheduler first let it run; None if none has."""
        return None if self.admitted_s is None else self.admitted_s - self.submitted_s

    @property
    def is_poison(self) -> bool:
        """True if scheduler after scheduler died where it ran."""
        return self.num_deaths >= MAX_DEATHS or self.num_deaths_in_all >= MAX_DEATHS_IN_ALL

    def lose(self, now_s: float, loss: PeerLoss = PeerLoss.HARMLESS) -> None:
        """Records that the stream to the scheduler that had the request is gone.

        Whether that died, perhaps of this request, is not known before one answers: see `judge`.
        """
        if not self.is_submitted:
            return  # no other scheduler has had it since
        self._unjudged, self._did_run = loss, self.is_running
        self.is_running = False
        self.lost_s = now_s
        self.losses_s = [*self.losses_s, now_s][-MOST_TOLD_LOSSES:]
        self.is_submitted = False
        if not self.output_token_ids:
            self._prompt_outputs = []  # the next scheduler reports the whole prompt again

    def judge(self, is_other: bool) -> None:
        """Counts the last loss if it is another scheduler that answers now.

        If it is the same one, a connection was lost and nothing died, unless it ended the stream.
        """
        loss, self._unjudged = self._unjudged, None
        if loss is None:
            return
        if is_other or loss is PeerLoss.OWN_END:
            self.num_losses += 1
        if is_other and loss is PeerLoss.UNCLEAR and self._did_run:
            self.num_deaths += 1
            self.num_deaths_in_all += 1
