"""A trace of sessions on the production core, under a virtual clock."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core import SchedulerConfig
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.capacity.virtual_server import ServedWorkload, VirtualServer
from simulator.capacity.workload import Arrival
from simulator.sessions.trace import SessionTrace, SessionTurn, Texts


@dataclass(frozen=True, slots=True)
class _TurnTokens:
    """The tokens of a turn, made when they are read: all prompts together are gigabytes."""

    texts: Texts
    turn: SessionTurn
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
    trace: SessionTrace, config: SchedulerConfig, step_time: StepTime, lookahead: int
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
            recorded=_TurnTokens(texts, turn),
            follows=turn.follows,
            pause_s=turn.pause_s,
        )
        for turn in trace.turns
    ]
    return VirtualServer(config, step_time, lookahead).serve(arrivals)
