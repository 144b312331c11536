"""A trace of sessions on the production core, under a virtual clock."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core import SchedulerConfig, SessionHint
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.capacity.virtual_server import ServedWorkload, VirtualServer
from simulator.capacity.workload import Arrival
from simulator.sessions.trace import SessionTrace, SessionTurn, Texts


@dataclass(frozen=True, slots=True)
class ToldHints:
    """The hints of the clients of simulated sessions about each turn."""

    names: bool = False  # its session, and the one that awaits it
    ends: bool = False  # that it is the last one
    ttl_s: float | None = None  # within which the next one comes

    def of(self, turn: SessionTurn) -> SessionHint | None:
        """The hint with a turn; None where nothing is said."""
        ttl_s = 0.0 if self.ends and turn.is_last else self.ttl_s
        if not self.names:
            return None if ttl_s is None else SessionHint(ttl_s=ttl_s)
        parent = "" if turn.parent is None else str(turn.parent)
        return SessionHint(str(turn.session), parent, ttl_s)


@dataclass(frozen=True, slots=True)
class _TurnTokens:
    """The tokens of a turn, made when they are read: all prompts together are gigabytes."""

    texts: Texts
    turn: SessionTurn
    session: SessionHint | None
    cache_salt: str = ""
    skip_prefix_cache: bool = False
    takes_drafts: bool = False

    @property
    def prompt(self) -> NDArray[np.int32]:
        return self.texts.prompt(self.turn)

    @property
    def output(self) -> NDArray[np.int32]:
        return self.texts.output(self.turn)


def serve(
    trace: SessionTrace,
    config: SchedulerConfig,
    step_time: StepTime,
    lookahead: int,
    hints: ToldHints = ToldHints(),
    tier_s_per_block: float = 0.0,
) -> ServedWorkload:
    """Serves each turn its pause after the turns that it follows have ended.

    Raises BadTrace for a turn that can never run.
    """
    texts = Texts(trace.seed)
    arrivals = [
        Arrival(
            turn.at_s,
            turn.prompt_tokens,
            turn.output_tokens,
            recorded=_TurnTokens(texts, turn, hints.of(turn)),
            follows=turn.follows,
            pause_s=turn.pause_s,
        )
        for turn in trace.turns
    ]
    server = VirtualServer(config, step_time, lookahead, tier_s_per_block=tier_s_per_block)
    return server.serve(arrivals)
