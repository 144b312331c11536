"""Branches of the tree of cached chains, and what waiting sequences will read of them."""

from dataclasses import dataclass

from scheduler_svc.core.request.session_hint import NOTHING_TOLD, ToldSession

NO_BRANCH = 0
FAR = 64  # blocks of work until a turn that is far
PATIENCE = 8  # times the work that a sequence lacks is done before it may cost others theirs


@dataclass(slots=True)
class Branch:
    """The blocks of one session alone, or those that several begin with."""

    is_shared: bool = False
    last_use: int = 0  # in order of all uses
    last_use_s: float = 0.0
    left_s: float = 0.0  # when its session last ended a turn
    num_blocks: int = 0  # that belong to it, free or held
    num_free: int = 0  # of these
    is_kept: bool = True
    is_running: bool = False  # a sequence goes on with it
    num_expecting: int = 0  # waiting sequences that will read it
    # Blocks that may be missing from a prompt of the same session: those of its last answer.
    slack: int = 0
    base: int = NO_BRANCH  # the branch before it when it began, which may be gone
    told: ToldSession = NOTHING_TOLD  # by the client of its last turn
    num_pinned: int = 0  # blocks that its client keeps for longer than others'
    num_turns: int = 0
    num_prompt_tokens: int = 0  # of these turns
    num_found_tokens: int = 0  # of these, tokens that were not computed


@dataclass(slots=True)
class Expectation:
    """A waiting sequence: when its turn comes, and what it will read then."""

    turn: int  # the work done by then, in tokens
    num_blocks: int  # of its tokens
    num_lacking: int  # of these, those that it does not find
    branches: list[int]  # from the beginning of its chain on

    @property
    def lacks_most(self) -> bool:
        """True if more than half of its blocks are not found."""
        return 2 * self.num_lacking > self.num_blocks
