"""CUDA graphs of what rows ask for in addition to a token: a handful of launches for all of it.

A step's logits are widened into one float32 buffer, which graphs of their own read and change: for
log probabilities, for penalties, and for the draw with the masks of grammars. What is asked, and by
which rows, comes in one copy, and the answers leave in one. Rarer requests are launched kernel by
kernel in between: allowed ids, bad words, minimum tokens, biases.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.penalties import penalize
from kernels.sampling.restrict_rows import restrict_rows
from worker_svc.device.capture_stream import captured, capturing
from worker_svc.device.transfer import PinnedRing, download, fetched
from worker_svc.parallel.vocab_part import VocabPart
from worker_svc.protocol.step import IntColumn, Limits
from worker_svc.runner.batch_state import Staged
from worker_svc.runner.device_sampling import SampleExtras
from worker_svc.runner.device_slots import SlotsOnDevice
from worker_svc.runner.graphs.asked_map import AskedLayout
from worker_svc.runner.graphs.decode_graphs import size_for
from worker_svc.runner.graphs.step_graphs import StepGraphs
from worker_svc.runner.graphs.step_map import StepMap
from worker_svc.sampling.grammars import GrammarRows
from worker_svc.sampling.logits_processors import process_logits
from worker_svc.sampling.logprobs import Logprobs
from worker_svc.sampling.sampler import SamplingRows

log = logging.getLogger(__name__)

# Of larger steps, or where more rows ask for the same thing, the device takes longer than single
# launches do; and logits in float32 take a gigabyte for 1,024 rows of 262,144 ids.
MOST_ROWS, MOST_ASKING = 256, 64
MOST_TOP = 20  # likeliest tokens of a row; who asks for more searches beams


class _Kind(Enum):
    """The work of a graph."""

    WIDEN = "widen"
    LOGPROBS = "logprobs"
    PENALTIES = "penalties"
    GUESS = "guess"
    DRAW = "draw"
    DRAW_FILTERED = "draw filtered"
    LOOK_UP = "look up"


@dataclass(frozen=True, slots=True)
class _Work:
    """The target of a capture: so many rows, or so many that ask."""

    kind: _Kind
    size: int


class AskedGraphs:
    """Graphs of one runner, valid as long as its slots and its graphs of steps stay in place."""

    def __init__(self, steps: StepGraphs, slots: SlotsOnDevice, limits: Limits) -> None:
        self._steps = steps
        self._slots = slots
        self.row_sizes = tuple(size for size in steps.row_sizes if size <= MOST_ROWS)
        most_rows, device = self.row_sizes[-1], slots.device
        most = min(MOST_ASKING, most_rows)
        self.sizes = (*(size for size in (4, 16) if size < most), most)
        self._layout = AskedLayout(most_rows, most)
        self._ring = PinnedRing(self._layout.num_words, device)
        zeros = partial(torch.zeros, dtype=torch.int32, device=device)
        self._buffer = zeros(self._layout.num_words)
        self._columns = self._layout.columns(self._buffer)
        self._logits = zeros((most_rows, limits.vocab_size), dtype=torch.float32)
        self._logprobs = zeros((most, limits.vocab_size), dtype=torch.float32)
        self._finite = zeros(most_rows, dtype=torch.bool)
        self._rows = torch.from_numpy(np.arange(most_rows, dtype=np.int32)).to(device)
        self._guesses = zeros(most_rows)
        self._masks = zeros((most_rows, -(-limits.vocab_size // 32)))
        self._num_top = min(MOST_TOP, limits.vocab_size)
        # [most_rows]: whether each has a choice; then of each row of log probabilities its token's
        # one, its rank, and the likeliest tokens and theirs, floats as bits.
        self._width = 2 + 2 * self._num_top
        self._answers = zeros(most_rows + most * self._width)
        self._choices, found = self._answers.tensor_split([most_rows])
        self._found = found.view(most, self._width)
        self._graphs: dict[_Work, torch.cuda.CUDAGraph] = {}
        # What each kind does, and its sizes; in an order in which each may run.
        self._kinds: dict[_Kind, tuple[Callable[[int], None], tuple[int, ...]]] = {
            _Kind.WIDEN: (self._widen, self.row_sizes),
            _Kind.LOGPROBS: (self._find_likeliest, self.sizes),
            _Kind.PENALTIES: (self._penalize, self.sizes),
            _Kind.GUESS: (self._guess, self.row_sizes),
            _Kind.DRAW: (partial(self._draw, filters=False), self.row_sizes),
            _Kind.DRAW_FILTERED: (partial(self._draw, filters=True), self.row_sizes),
            _Kind.LOOK_UP: (self._look_up, self.sizes),
        }

    def rehearsals(self) -> list[Callable[[], None]]:
        """Launches of kernels of ours that `capture` captures, as calls that need no request."""
        ours = (_Kind.PENALTIES, _Kind.DRAW, _Kind.DRAW_FILTERED)
        return [partial(self._run, work) for work in self._all_work() if work.kind in ours]

    def capture(self, pool: Any, largest_only: bool = False) -> None:
        """Captures all graphs, or the largest of each kind, those first: they decide the memory.

        The graphs of steps must be captured already: these read what those leave.
        """
        started = time.perf_counter()
        self._ring.send(self._layout.empty(), self._buffer)
        with capturing(self._slots.device):
            for work in self._all_work(largest_only):
                self._run(work)  # compiles; the libraries make workspaces
                self._graphs[work] = captured(partial(self._run, work), pool)
        log.info(
            "%d graphs of requests captured in %.1f s",
            len(self._graphs),
            time.perf_counter() - started,
        )

    def hold(self, step: StepMap, sampling: SamplingRows) -> bool:
        """True if they do all that a step's rows ask for."""
        wanted = sampling.wanted
        if step.num_sampled > self.row_sizes[-1]:
            return False
        if wanted.num_top > self._num_top or wanted.named is not None:
            return False
        return self._layout.holds(sampling.logits_processors, len(wanted))

    def sample(
        self, step: StepMap, staged: Staged, sampling: SamplingRows, filters: bool
    ) -> SampleExtras:
        """Samples from the logits of a step's last tokens, with all that its rows ask for.

        What grammars allow may still be computed on the host. The device waits for it, after all
        work that does not need it.
        """
        num_rows, wanted = step.num_sampled, sampling.wanted
        processors = sampling.logits_processors.moved(step.places)
        written = self._slots.next_places(staged, wanted.rows)
        words = self._layout.words(processors, step.places[wanted.rows], written)
        self._ring.send(words, self._buffer)
        self._replay(_Kind.WIDEN, num_rows)
        if len(wanted):
            self._replay(_Kind.LOGPROBS, len(wanted))
        others = replace(processors, grammars=None, penalties=None)
        if others:
            process_logits(self._logits, others)
        if processors.penalties is not None:
            self._replay(_Kind.PENALTIES, len(processors.penalties.rows))
        if processors.grammars is not None:
            self._guess_for(processors.grammars, num_rows)
            processors.grammars.copy(self._masks)
        self._replay(_Kind.DRAW_FILTERED if filters else _Kind.DRAW, num_rows)
        if len(wanted):
            self._replay(_Kind.LOOK_UP, len(wanted))
        return self._extras(sampling, processors.rows)

    def _guess_for(self, grammars: GrammarRows, num_rows: int) -> None:
        """Sends the tokens that rows draw without masks to the thread that fills these."""
        if grammars.guesses is None:
            return
        self._replay(_Kind.GUESS, num_rows)
        read, rows = download(self._guesses[:num_rows]), grammars.rows
        grammars.guesses.bring(lambda: read()[rows])

    def _extras(self, sampling: SamplingRows, changed: IntColumn) -> SampleExtras:
        """Starts the copy of the answers: of rows that change, or of log probabilities, or both."""
        wanted, has_changes = sampling.wanted, len(changed) > 0
        begin, end = (0 if has_changes else len(self._choices)), len(self._choices)
        there = fetched(self._answers[begin : end + len(wanted) * self._width])
        choices, found = there.tensor_split([end - begin])
        return SampleExtras(
            self._read(found.view(-1, self._width), sampling) if len(wanted) else None,
            choices if has_changes else None,
            sampling.logits_processors,
            choice_places=changed,
        )

    def _read(self, found: Tensor, sampling: SamplingRows) -> Logprobs:
        """The log probabilities [N, width], which may still be on their way."""
        num_top, first = sampling.wanted.num_top, 2 + self._num_top
        floats = found.view(torch.float32)
        return Logprobs(
            np.asarray(sampling.wanted.rows),
            floats[:, 0],
            found[:, 1],
            found[:, 2 : 2 + num_top],
            floats[:, first : first + num_top],
        )

    def _all_work(self, largest_only: bool = False) -> list[_Work]:
        """The largest of each kind first."""
        return [
            _Work(kind, size)
            for kind, (_, sizes) in self._kinds.items()
            for size in (sizes[-1:] if largest_only else sizes[::-1])
        ]

    def _replay(self, kind: _Kind, number: int) -> None:
        """For so many rows, or so many that ask."""
        _, sizes = self._kinds[kind]
        self._graphs[_Work(kind, size_for(sizes, number))].replay()

    def _run(self, work: _Work) -> None:
        do, _ = self._kinds[work.kind]
        do(work.size)

    def _widen(self, num_rows: int) -> None:
        logits = self._logits[:num_rows]
        logits.copy_(self._steps.part_of(num_rows).whole())
        # A sum is finite only if every term is.
        self._finite[:num_rows] = logits.sum(-1).isfinite()

    def _find_likeliest(self, number: int) -> None:
        logits = self._logits.index_select(0, self._columns.wanted[:number])
        logprobs = torch.log_softmax(logits, -1, out=self._logprobs[:number])
        top, first = logprobs.topk(self._num_top, dim=-1), 2 + self._num_top
        self._found[:number, 2:first] = top.indices
        self._found.view(torch.float32)[:number, first:] = top.values

    def _penalize(self, number: int) -> None:
        columns, most, tokens = self._columns, self._layout.most, self._slots.token_rows
        rows = columns.penalized.view(4, most)[:, :number]
        factors = columns.factors.view(torch.float32).view(3, most)[:, :number]
        penalize(self._logits, tokens, rows, factors, tokens.shape[1])

    def _guess(self, num_rows: int) -> None:
        part, samplers = VocabPart(self._logits[:num_rows]), self._steps.samplers(num_rows)
        self._guesses[:num_rows] = self._slots.guess(part, samplers)

    def _draw(self, num_rows: int, filters: bool) -> None:
        logits, masks = self._logits[:num_rows], self._columns.masks[:num_rows]
        rows, finite = self._rows[:num_rows], self._finite[:num_rows]
        self._choices[:num_rows] = restrict_rows(logits, rows, masks, finite, self._masks)
        self._slots.sample(VocabPart(logits), self._steps.samplers(num_rows), filters)

    def _look_up(self, number: int) -> None:
        """Looks up the tokens that were drawn just now."""
        tokens = self._slots.token_rows.view(-1).index_select(0, self._columns.written[:number])
        logprobs = self._logprobs[:number]
        sampled = logprobs.gather(1, tokens.long()[:, None])
        self._found.view(torch.float32)[:number, :1] = sampled
        self._found[:number, 1] = (logprobs >= sampled).sum(-1)
