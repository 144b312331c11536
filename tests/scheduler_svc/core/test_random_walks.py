"""Random walks through the scheduler, with a full check after every step.

They are short; `soak.py` walks by the million, with more kinds of events.
"""

import random
from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core import FinishReason, RefusalKind, Refused, Request, SchedulerConfig
from tests.scheduler_svc.core.draws import SeededDraw
from tests.scheduler_svc.core.simulation import Simulation
from tests.scheduler_svc.core.world import SESSION_HINTS, VOCAB_SIZE, draw_config

LIMITS_OF_THE_QUEUE = (
    "max_waiting_requests",
    "max_waiting_tokens",
    "max_waiting_requests_per_tenant",
    "max_waiting_tokens_per_tenant",
)


def random_request(rng: random.Random, config: SchedulerConfig, handle: int) -> Request:
    """A random request; prompts are of three families, so that many share a prefix."""
    length = rng.randint(1, config.max_model_len - 1)
    family = rng.randrange(3)
    prompt = [(position * 7 + family) % VOCAB_SIZE for position in range(length)]
    if rng.random() < 0.5:
        prompt[rng.randrange(length) :] = [rng.randrange(VOCAB_SIZE)]
    max_tokens = rng.randint(1, 16)
    is_prompt_only = rng.random() < 0.1
    end = len(prompt)
    report = rng.choice([(0, 0), (0, 0), (0, end - 1), (0, end), (end - 1, end)])
    return Request(
        request_id=f"r{handle}",
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        max_tokens=0 if is_prompt_only else max_tokens if rng.random() < 0.8 else None,
        min_tokens=0 if is_prompt_only else rng.choice([0, 0, 1, max_tokens]),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 1, 6]))),
        ignore_eos=rng.random() < 0.2,
        handle=handle,
        arrival_s=float(handle),
        deadline_s=handle + rng.uniform(1, 30) if rng.random() < 0.2 else None,
        priority=rng.randint(-2, 2),
        tenant=rng.choice("abc"),
        cache_salt=rng.choice(["", "", "", "red", "blue"]),
        skip_prefix_cache=rng.random() < 0.1,
        prompt_output_begin=report[0],
        prompt_output_end=report[1],
        session=SESSION_HINTS[handle % len(SESSION_HINTS)],
    )


def patient_config(seed: str) -> SchedulerConfig:
    """Limits without refusals for overload, which depend on timing."""
    return replace(draw_config(SeededDraw(seed)), **dict.fromkeys(LIMITS_OF_THE_QUEUE, 0))


def add_random(simulation: Simulation, rng: random.Random) -> None:
    """Submits a random request; it may be refused."""
    try:
        simulation.add(random_request(rng, simulation.config, len(simulation.requests)))
    except Refused as refused:
        assert refused.kind in (RefusalKind.NEVER_FITS, RefusalKind.OVERLOADED)


def replace_worker(simulation: Simulation, num_blocks: int) -> None:
    """Replaces the worker; requests that do not fit into its cache fail."""
    simulation.lose_worker(num_blocks)


ACTIONS = {
    "add": 12,
    "schedule": 45,
    "update": 40,
    "abort": 1.0,
    "expire": 2,
    "fail": 0.3,
    "replace": 0.5,
    "set_priority": 1,
    "reset": 0.5,
}


def walk(simulation: Simulation, rng: random.Random, num_actions: int, max_depth: int) -> None:
    """Random events, in any order."""
    for action in rng.choices(list(ACTIONS), list(ACTIONS.values()), k=num_actions):
        if action == "add":
            add_random(simulation, rng)
        elif action == "schedule" and simulation.scheduler.num_in_flight <= max_depth:
            simulation.schedule()
        elif action == "update" and simulation.results:
            simulation.update((rng.randrange(6),) if rng.random() < 0.01 else ())
        elif action == "abort" and simulation.live:
            simulation.abort(rng.choice(simulation.live))
        elif action == "fail" and simulation.live:
            simulation.fail([rng.choice(simulation.live), "missing"])
        elif action == "expire":
            simulation.expire(simulation.scheduler.now_s + rng.random())
        elif action == "set_priority" and simulation.live:
            simulation.set_priority(rng.choice(simulation.live), rng.randint(-2, 2))
        elif action == "reset":
            simulation.reset_prefix_cache()
        elif action == "replace":
            replace_worker(simulation, rng.randint(4, 24))


@pytest.mark.parametrize("max_depth", [0, 1, 3])
@pytest.mark.parametrize("seed", range(16))
def test_the_books_agree_after_every_action(seed: int, max_depth: int) -> None:
    rng = random.Random(1000 * max_depth + seed)
    simulation = Simulation(draw_config(SeededDraw(f"books/{seed}/{max_depth}")))
    walk(simulation, rng, num_actions=250, max_depth=max_depth)
    simulation.drain(depth=rng.randint(0, max_depth))
    scheduler = simulation.scheduler
    assert scheduler.num_finished == len(simulation.requests) == len(simulation.ends)
    assert scheduler.internal_state.pool.num_free == scheduler.internal_state.pool.num_usable
    assert scheduler.num_output_tokens == sum(map(len, simulation.outputs))


def run_to_the_end(seed: int, depth: int) -> tuple[list[list[int]], dict[int, FinishReason]]:
    """Runs the same requests from the same steps, with `depth` steps ahead of the results."""
    rng = random.Random(seed)
    simulation = Simulation(patient_config(f"ahead/{seed}"))
    for _ in range(6):
        for _ in range(4):
            add_random(simulation, rng)
        for _ in range(8):
            simulation.schedule()
            if simulation.scheduler.num_in_flight > depth:
                simulation.update()
    simulation.drain(depth)
    return simulation.outputs, simulation.ends


@pytest.mark.parametrize("seed", range(12))
def test_looking_ahead_changes_no_output(seed: int) -> None:
    calm = run_to_the_end(seed, depth=0)
    assert run_to_the_end(seed, depth=1) == calm
    assert run_to_the_end(seed, depth=3) == calm


@pytest.mark.parametrize("seed", range(6))
def test_the_same_events_give_the_same_plans(seed: int) -> None:
    def plans() -> list[tuple[int, list[int], list[int], list[str]]]:
        rng = random.Random(seed)
        simulation = Simulation(draw_config(SeededDraw(f"events/{seed}")))
        made = []
        for _ in range(120):
            walk(simulation, rng, num_actions=1, max_depth=1)
            plan = simulation.schedule() if simulation.scheduler.num_in_flight < 2 else None
            if plan is not None:
                blocks = [block for new in plan.new_sequences for block in new.block_ids]
                made.append((plan.step_id, plan.slots.tolist(), blocks, plan.preempted))
        return made

    assert plans() == plans()
