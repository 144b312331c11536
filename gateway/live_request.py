"""A request that the scheduler has, as the gateway keeps it: enough to read it and to ask again.

Tokens are the truth: prompt and output so far are all that another scheduler needs to go on.
"""

import asyncio
from dataclasses import dataclass, field

from gateway.errors import RequestError
from gateway.generation import Finish, Pooling, Reuse, SamplingParams, Standing
from gateway.logprobs import RawLogprobs
from rpc.prompt_reports import PromptReport


@dataclass(frozen=True, slots=True)
class Submission:
    """What was asked of the scheduler."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    standing: Standing
    reuse: Reuse
    pooling: Pooling | None = None
    output_token_ids: tuple[int, ...] = ()  # that its client has from an earlier attempt


@dataclass(frozen=True, slots=True)
class Arrival:
    """New tokens and, once there are no more to come, how it ended."""

    token_ids: list[int]
    logprobs: list[RawLogprobs]  # one per token, if asked for
    end: Finish | None
    reports: list[PromptReport] = field(default_factory=list)  # of the prompt, before the tokens


class LiveRequest:
    """A submitted request as its reader sees it: tokens, then an end.

    Tokens that come faster than they are read collect here, so a slow reader wakes up less often
    and holds up nobody. max_tokens bounds them.
    """

    __slots__ = (
        "_end",
        "_logprobs",
        "_reports",
        "_token_ids",
        "_waiter",
        "handle",
        "is_submitted",
        "lost_s",
        "num_cached_tokens",
        "num_losses",
        "output_token_ids",
        "submission",
        "submitted_s",
    )

    def __init__(self, handle: int, submission: Submission, now_s: float = 0.0) -> None:
        self.handle = handle
        self.submission = submission
        self.submitted_s = now_s
        self.num_cached_tokens = 0  # known with the first token
        self.output_token_ids = list(submission.output_token_ids)  # whether read or not
        # After the scheduler was lost: since when, how often without a token, and whether the next
        # one has been asked.
        self.lost_s: float | None = None
        self.num_losses = 0
        self.is_submitted = True
        self._token_ids: list[int] = []
        self._logprobs: list[RawLogprobs] = []
        self._reports: list[PromptReport] = []
        self._end: Finish | RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def receive(self) -> Arrival:
        """What came since the last call; waits for it.

        Raises RequestError when the request was refused or failed; tokens that came before are
        returned first. One reader only.
        """
        if not self._token_ids and self._end is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        token_ids, self._token_ids = self._token_ids, []
        logprobs, self._logprobs = self._logprobs, []
        reports, self._reports = self._reports, []
        if isinstance(self._end, RequestError):
            if not token_ids:
                raise self._end
            return Arrival(token_ids, logprobs, None, reports)
        return Arrival(token_ids, logprobs, self._end, reports)

    def add(self, token_id: int, logprobs: RawLogprobs | None) -> None:
        """One more token; wake() tells the reader."""
        self._token_ids.append(token_id)
        self.output_token_ids.append(token_id)
        if self.lost_s is not None:  # the new scheduler goes on with it
            self.lost_s, self.num_losses = None, 0
        if logprobs is not None:
            self._logprobs.append(logprobs)

    def add_report(self, report: PromptReport) -> None:
        """What was found out about a part of the prompt; the first token, or the end, is behind."""
        self._reports.append(report)

    def end(self, how: Finish | RequestError) -> None:
        """Nothing more will come; wake() tells the reader."""
        self._end = how

    def wake(self) -> None:
        """Lets the reader see what was added; once per step, not once per token."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def lose(self, now_s: float) -> None:
        """The scheduler that had it is gone."""
        if not self.is_submitted:
            return  # no other has had it since
        self.lost_s = now_s if self.lost_s is None else self.lost_s
        self.num_losses += 1
        self.is_submitted = False
        if not self.output_token_ids:
            self._reports = []  # the next one tells of the whole prompt again
