"""Random actions on a scheduler, by the million, with a full check after every one.

    python -m tests.scheduler_svc.core.soak --actions 1000000 --seed 1
    python -m tests.scheduler_svc.core.soak --seed 1 --episode 17 --tell     one episode again

A soak consists of episodes: a scheduler with limits of its own runs for a number of actions and
then finishes all requests. Seed and episode determine every action.
"""

import argparse
import contextlib
import hashlib
import importlib
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.scheduler_svc.core.draws import SeededDraw
from tests.scheduler_svc.core.world import RULES, World, draw_config

for _rules in ("clients", "drafts", "grants", "requirements", "workers"):
    importlib.import_module(f"tests.scheduler_svc.core.rules_of_{_rules}")  # registers rules

ACTIONS_PER_EPISODE = 1000
MOST_EPISODES = 80  # in which a planted bug is looked for


@dataclass(slots=True)
class Tally:
    """Counts of actions and events."""

    num_actions: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    applied: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)

    def add(self, world: World) -> None:
        """Adds a world that has ended."""
        self.num_requests += len(world.requests)
        self.num_tokens += world.scheduler.num_output_tokens
        self.num_steps += world.scheduler.counters.num_steps
        self.num_preemptions += world.scheduler.internal_state.num_preemptions
        self.ends.update(reason.value for reason in world.ends.values())


class Failed(Exception):
    """Raised after an action that violates an invariant; the cause says which."""


def draw_weights(draw: SeededDraw) -> dict[str, float]:
    """Weights of the rules, drawn per episode: what is rare on average is common in some."""
    weights = {name: rule.weight * draw.pick((0.2, 1.0, 1.0, 5.0)) for name, rule in RULES.items()}
    crowd = draw.pick((0.1, 0.4, 1.0))  # grants, for example, need an empty queue at times
    return {n: w * (crowd if n.startswith("submit") else 1.0) for n, w in weights.items()}


def run_episode(seed: int, episode: int, num_actions: int, tally: Tally, tell: bool) -> str:
    """Runs one scheduler to its end; returns a digest of its plans. Raises Failed."""
    draw = SeededDraw(f"{seed}/{episode}")
    world = World(draw_config(draw), max_depth=draw.integer(0, 3))
    weights = draw_weights(draw)
    for number in range(num_actions):
        possible = [rule for rule in RULES.values() if rule.is_possible(world)]
        rule = draw.weighted(possible, [weights[rule.name] for rule in possible])
        if tell:
            print(f"{number}: {rule.name}", flush=True)
        try:
            rule.apply(world, draw)
            world.check()
        except Exception as error:
            raise Failed(
                f"seed {seed}, episode {episode}, action {number} ({rule.name})"
            ) from error
        tally.num_actions += 1
        tally.applied[rule.name] += 1
    try:
        world.settle()
    except Exception as error:
        raise Failed(f"seed {seed}, episode {episode}, after the last action") from error
    tally.add(world)
    world.plans.update(repr((world.outputs, world.ends)).encode())
    return world.plans.hexdigest()[:16]


def assert_found(first: int) -> None:
    """Asserts that a planted bug is found; `first` is the episode in which it was, when planted.

    Any seed finds it eventually: the search goes on where that has changed.
    """
    with contextlib.suppress(Failed):
        for episode in range(first, first + MOST_EPISODES):
            run_episode(seed=1, episode=episode, num_actions=500, tally=Tally(), tell=False)
        raise AssertionError(f"not found in {MOST_EPISODES} episodes")


def describe_commit() -> str:
    """The commit of the working tree, if known."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def report(tally: Tally, seed: int, commit: str, digest: str, duration_s: float) -> str:
    """The report of a run, as text."""
    width = max(map(len, RULES))
    lines = [
        f"seed {seed}, commit {commit}, Python {sys.version.split()[0]}",
        f"{tally.num_actions} actions of {len(RULES)} rules, "
        f"{tally.num_actions / duration_s:.0f}/s",
        f"{tally.num_requests} requests, {tally.num_steps} steps, {tally.num_tokens} tokens, "
        f"{tally.num_preemptions} preemptions",
        "ends: " + ", ".join(f"{count} {reason}" for reason, count in tally.ends.most_common()),
        f"digest {digest}",
        *(f"  {name:{width}} {tally.applied[name]:8}" for name in RULES),
    ]
    return "\n".join(lines)


def main() -> int:
    """Runs the episodes; returns 1 when an invariant is violated."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--actions", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--episode", type=int, help="this one only")
    parser.add_argument("--tell", action="store_true", help="name every action")
    options = parser.parse_args()
    num_episodes = -(-options.actions // ACTIONS_PER_EPISODE)
    episodes = range(num_episodes) if options.episode is None else [options.episode]
    commit = describe_commit()  # of the loaded code: the tree may change during the run
    tally, digest, began_s = Tally(), hashlib.sha256(), time.perf_counter()
    for episode in episodes:
        told = run_episode(options.seed, episode, ACTIONS_PER_EPISODE, tally, options.tell)
        digest.update(told.encode())
    duration_s = time.perf_counter() - began_s
    print(report(tally, options.seed, commit, digest.hexdigest()[:16], duration_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
