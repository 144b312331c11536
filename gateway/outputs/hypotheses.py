"""The algorithm of beam search: which continuations run on, which have finished, when it is over.

It knows tokens and log probabilities, and neither models nor requests. The rules are those of
`transformers`' `GenerationMixin._beam_search`, for one prompt.
"""

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from gateway.request.beam_options import NEVER, BeamOptions
from gateway.text.logprobs import RawLogprobs

NOTHING_FINISHED = -1e9  # scores worse than every output


class Beam(NamedTuple):
    """A sequence of output tokens: one more than its parent, or none."""

    total: float = 0.0  # sum of the log probabilities
    parent: "Beam | None" = None
    token_id: int = 0
    place: int = 0  # of the token in `row`, from 0
    row: RawLogprobs | None = None  # the likeliest tokens after the parent

    @property
    def path(self) -> list["Beam"]:
        """The beams that lead here, one per token."""
        path, beam = list["Beam"](), self
        while beam.parent is not None:
            path.append(beam)
            beam = beam.parent
        path.reverse()
        return path

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens, first to last."""
        return tuple(beam.token_id for beam in self.path)

    @property
    def logprobs(self) -> list[RawLogprobs]:
        """The model's logprobs of each token, first to last."""
        return [
            replace(beam.row, logprob=beam.row.top_logprobs[beam.place], rank=beam.place + 1)
            for beam in self.path
            if beam.row is not None  # the empty beam has none, and is in no path
        ]


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """An output: it ended with a token that ends outputs, or at the limit of tokens."""

    beam: Beam
    score: float
    is_stopped: bool  # by its last token


class Hypotheses:
    """The running beams and the finished ones."""

    def __init__(self, options: BeamOptions, end_ids: Collection[int], max_tokens: int) -> None:
        """Begins with one empty beam, which ends with one of `end_ids` or after `max_tokens`."""
        self._options = options
        self._end_ids = frozenset(end_ids)
        self._max_tokens = max_tokens
        self.num_tokens = 0  # of each running beam
        self.running = [Beam()]  # likeliest first
        self.finished: list[FinishedBeam] = []  # best first, at most one per beam
        self.is_over = False

    @property
    def num_candidates(self) -> int:
        """The number of likeliest tokens of each running beam that `advance` needs.

        So many that enough of the best continuations go on, if all that can end do.
        """
        return max(2, 1 + len(self._end_ids)) * self._options.num_beams

    def advance(self, rows: Sequence[RawLogprobs]) -> None:
        """Adds a token to the running beams, of which row i tells the likeliest tokens."""
        candidates = self._candidates(rows)
        self.num_tokens += 1
        is_last = self.num_tokens >= self._max_tokens
        num_beams = self._options.num_beams
        ending = candidates if is_last else [b for b in candidates if b.token_id in self._end_ids]
        # Those after the first ones are there to go on, and no outputs.
        ended = set(map(id, ending))
        self._finish([beam for beam in candidates[:num_beams] if id(beam) in ended])
        self.running = [beam for beam in candidates if id(beam) not in ended][:num_beams]
        self.is_over = not self.running or self._is_full_early or not self._may_improve

    def _candidates(self, rows: Sequence[RawLogprobs]) -> list[Beam]:
        """The best continuations of all running beams, best first."""
        every = (
            Beam(beam.total + logprob, beam, token_id, place, row)
            for beam, row in zip(self.running, rows, strict=True)
            for place, (token_id, logprob) in enumerate(
                zip(row.top_token_ids, row.top_logprobs, strict=True)
            )
        )
        return heapq.nlargest(self.num_candidates, every, key=lambda beam: beam.total)

    def _finish(self, ended: Sequence[Beam]) -> None:
        if not ended:
            return
        scale = self.num_tokens**self._options.length_penalty
        new = (
            FinishedBeam(beam, beam.total / scale, beam.token_id in self._end_ids) for beam in ended
        )
        merged = sorted(chain(self.finished, new), key=lambda one: one.score, reverse=True)
        self.finished = merged[: self._options.num_beams]

    @property
    def _is_full(self) -> bool:
        return len(self.finished) == self._options.num_beams

    @property
    def _is_full_early(self) -> bool:
        return self._options.early_stopping is True and self._is_full

    @property
    def _may_improve(self) -> bool:
        """True if the best running beam could become better than the worst finished one."""
        options = self._options
        is_patient = options.early_stopping == NEVER and options.length_penalty > 0
        length = self._max_tokens if is_patient else self.num_tokens
        best: float = self.running[0].total / length**options.length_penalty
        worst = self.finished[-1].score if self._is_full else NOTHING_FINISHED
        return best > worst
