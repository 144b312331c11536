"""A spec's sessions as turns: which tokens each prompt consists of, when it comes, what it awaits.

A prompt is pieces of texts: a system prompt that sessions share, then what its session has said so
far. A session that is compacted goes on with another text, so that its old one is never read again.
Times are those of a server on which no turn waits: they fix the order of the turns, whatever the
policy that serves them.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.estimate.step_time import StepTime
from simulator.sessions.spec import LogNormal, SessionSpec

VOCAB_SIZE = 32_000
_STAGGER_S = 30.0  # within which the first sessions begin


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """The first tokens of a text."""

    text: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """One request of a session."""

    session: int
    parent: int | None  # the session whose subagent this one is
    at_s: float  # when it comes, if it follows none or if no turn before it waited
    follows: tuple[int, ...]  # the numbers of turns that end before it begins
    pause_s: float  # after the last end of these
    pieces: tuple[PromptPiece, ...]  # of the prompt; the output continues the last one's text
    output_tokens: int
    calls_tool: bool  # its output ends with a call; otherwise a person answers it, or no one
    is_last: bool  # of its session

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(piece.num_tokens for piece in self.pieces)


class Texts:
    """The tokens of all texts, by number: the same for one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._tokens: dict[int, NDArray[np.int32]] = {}

    def of(self, text: int, end: int) -> NDArray[np.int32]:
        """The first `end` tokens of a text."""
        known = self._tokens.get(text)
        if known is None or len(known) < end:
            rng = np.random.default_rng((self._seed, text))
            # Drawn anew from the start, twice as long: a text grows by few tokens a turn.
            known = self._tokens[text] = rng.integers(0, VOCAB_SIZE, 2 * end, dtype=np.int32)
        return known[:end]

    def prompt(self, turn: SessionTurn) -> NDArray[np.int32]:
        """The tokens of a turn's prompt."""
        return np.concatenate([self.of(piece.text, piece.num_tokens) for piece in turn.pieces])

    def output(self, turn: SessionTurn) -> NDArray[np.int32]:
        """The tokens of a turn's answer."""
        last = turn.pieces[-1]
        return self.of(last.text, last.num_tokens + turn.output_tokens)[last.num_tokens :]


@dataclass(frozen=True)
class SessionTrace:
    """Turns in the order in which they come."""

    turns: list[SessionTurn]
    seed: int

    @cached_property
    def most_alive_tokens(self) -> int:
        """The most tokens that the contexts of sessions hold at one time that will go on."""
        last = {turn.session: number for number, turn in enumerate(self.turns)}
        alive: dict[int, int] = {}  # tokens by text
        of_session: dict[int, int] = {}  # its own text
        most = 0
        for number, turn in enumerate(self.turns):
            *shared, own = turn.pieces
            for piece in shared:
                alive[piece.text] = piece.num_tokens
            if (before := of_session.get(turn.session)) not in (None, own.text):
                alive.pop(before, None)
            of_session[turn.session] = own.text
            alive[own.text] = own.num_tokens + turn.output_tokens
            most = max(most, sum(alive.values()))
            if last[turn.session] == number:
                del alive[own.text]
        return most


def draw(spec: SessionSpec, seed: int, step_time: StepTime) -> SessionTrace:
    """The sessions of a seed. `step_time` says how long a turn lasts that waits for nothing."""
    return SessionTrace(_Drawing(spec, seed, step_time).turns(), seed)


@dataclass(slots=True)
class _Session:
    """A session that is being drawn."""

    number: int
    parent: int | None
    num_turns: int
    at_s: float  # of its next turn
    system: PromptPiece
    own: PromptPiece
    follows: tuple[int, ...] = ()
    ended_s: float = 0.0  # the last end of these
    subagents_after: frozenset[int] = frozenset()  # turns after which a subagent runs
    num_drawn: int = 0


@dataclass(slots=True)
class _Drawing:
    """Draws turns in order of time, so that numbers of earlier turns are known."""

    spec: SessionSpec
    seed: int
    step_time: StepTime
    rng: np.random.Generator = field(init=False)
    _texts: Iterator[int] = field(init=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _coming: list[tuple[float, int, _Session]] = field(default_factory=list)
    _awaiting: dict[int, _Session] = field(default_factory=dict)  # parents, by a subagent's number
    _num_begun: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self._texts = itertools.count(2 * self.spec.system_prompts)  # subagents have their own

    def turns(self) -> list[SessionTurn]:
        for _ in range(min(self.spec.concurrency, self.spec.sessions)):
            self._begin(self.rng.uniform(0, _STAGGER_S), ())
        turns: list[SessionTurn] = []
        while self._coming:
            _, _, session = heapq.heappop(self._coming)
            self._take_turn(session, turns)
        return turns

    def _begin(self, at_s: float, follows: tuple[int, ...]) -> None:
        spec, rng = self.spec, self.rng
        self._num_begun += 1
        num_turns = max(round(spec.turns.draw(rng)), 1)
        after: set[int] = set()
        if rng.random() < spec.subagent_share and num_turns > 1:
            after = set(rng.integers(1, num_turns, spec.subagents).tolist())
        system = PromptPiece(int(rng.integers(spec.system_prompts)), spec.system_tokens)
        own = PromptPiece(next(self._texts), self._draw(spec.first_tokens))
        session = _Session(next(self._numbers), None, num_turns, at_s, system, own)
        session.follows, session.ended_s = follows, at_s
        session.subagents_after = frozenset(after)
        self._push(session)

    def _push(self, session: _Session) -> None:
        heapq.heappush(self._coming, (session.at_s, session.number, session))

    def _draw(self, quantity: LogNormal) -> int:
        return max(round(quantity.draw(self.rng)), 1)

    def _take_turn(self, session: _Session, turns: list[SessionTurn]) -> None:
        spec, rng = self.spec, self.rng
        output = self._draw(spec.output_tokens)
        session.num_drawn += 1
        is_last = session.num_drawn == session.num_turns
        waits = rng.random() < spec.person_share and session.parent is None
        number = len(turns)
        turns.append(
            SessionTurn(
                session.number,
                session.parent,
                session.at_s,
                session.follows,
                session.at_s - session.ended_s if session.follows else 0.0,
                (session.system, session.own),
                output,
                not (is_last or waits),
                is_last,
            )
        )
        end_s = session.at_s + self._duration_s(session, output)
        if is_last:
            self._end(session, number, end_s)
            return
        self._grow(session, output)
        session.follows, session.ended_s = (number,), end_s
        pause = spec.person_pause_s if waits else spec.tool_pause_s
        session.at_s = end_s + pause.draw(rng)
        if session.num_drawn in session.subagents_after and not waits:
            self._delegate(session, end_s)
        else:
            self._push(session)

    def _duration_s(self, session: _Session, output: int) -> float:
        prefill_s = self.step_time.of(self._draw(self.spec.new_tokens), session.own.num_tokens)
        return prefill_s + (output - 1) * self.step_time.of(1, session.own.num_tokens)

    def _grow(self, session: _Session, output: int) -> None:
        """Adds a turn's output, and what comes back for it; compacts what grows too long."""
        spec, own = self.spec, session.own
        new = self._draw(spec.new_tokens)
        grown = own.num_tokens + output + new
        if spec.system_tokens + grown + spec.output_tokens.bound > spec.max_tokens:
            session.own = PromptPiece(next(self._texts), spec.compact_tokens + new)
        else:
            session.own = PromptPiece(own.text, grown)

    def _delegate(self, parent: _Session, at_s: float) -> None:
        """Begins a subagent, whose end its parent awaits."""
        spec = self.spec
        system = PromptPiece(spec.system_prompts + parent.system.text, spec.system_tokens)
        own = PromptPiece(next(self._texts), self._draw(spec.first_tokens))
        num_turns = self._draw(spec.subagent_turns)
        agent = _Session(next(self._numbers), parent.number, num_turns, at_s, system, own)
        agent.follows, agent.ended_s = parent.follows, at_s
        self._awaiting[agent.number] = parent
        self._push(agent)

    def _end(self, session: _Session, number: int, end_s: float) -> None:
        parent = self._awaiting.pop(session.number, None)
        if parent is not None:
            parent.at_s, parent.ended_s = max(parent.at_s, end_s), end_s
            parent.follows = (*parent.follows, number)
            self._push(parent)
        elif self._num_begun < self.spec.sessions:
            self._begin(end_s, (number,))
