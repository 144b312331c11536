"""A scenario drawn from a seed: limits, clients, workers, and failures with their times."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from scheduler_svc.config import ServiceConfig
from scheduler_svc.core import CachePolicy, Policy, Preemption
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.chaos.virtual_network import Weather
from simulator.chaos.virtual_worker import VirtualWorker
from simulator.workers.fake_worker import FakeModel

VOCAB_SIZE = 50
HEARTBEAT_TIMEOUT_S, STEP_TIMEOUT_S = 1.0, 2.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request that a client will make."""

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int | None
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    seed: int
    timeout_s: float | None
    priority: int
    tenant: str
    gives_up_after_s: float | None
    cache_salt: str
    skip_prefix_cache: bool
    fork_group: str = ""


@dataclass(frozen=True, slots=True)
class Mishap:
    """A failure of a worker or its network, and its duration."""

    at_s: float
    worker: int
    name: str
    lasts_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a seed determines."""

    seed: int
    config: ServiceConfig
    model: FakeModel
    num_blocks: tuple[int, ...]  # per worker; the model's number is the largest
    step_time: StepTime
    clients: tuple[tuple[Ask, ...], ...]
    mishaps: tuple[Mishap, ...]
    loss: float  # probability per frame during bad weather
    repeat: float
    reorder: float
    delay_s: float
    jitter_s: float
    calm_from_s: float  # no failures from this time on

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the workers."""
        return self.config.workers


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    max_num_seqs = rng.randint(1, 6)
    model = FakeModel(
        num_blocks=rng.randint(12, 40),
        block_size=rng.choice([2, 3, 4]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.randint(max_num_seqs, 32),
        max_model_len=rng.randint(24, 64),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=rng.choice([(), (0,)]),
        num_host_blocks=rng.choice([0, 6, 30]),
    )
    calm_from_s = rng.uniform(2, 6)
    is_bad = rng.random() < 0.4
    num_workers = rng.choice([1, 2])
    return Scenario(
        seed=seed,
        config=_draw_config(rng, model, num_workers),
        model=model,
        num_blocks=(
            model.num_blocks,
            *(rng.randint(12, model.num_blocks) for _ in range(num_workers - 1)),
        ),
        step_time=StepTime(
            rng.choice([0.0005, 0.002, 0.01, 0.03]), rng.uniform(0, 5e-4), rng.uniform(0, 1e-5)
        ),
        clients=tuple(
            _draw_client(rng, model, calm_from_s, number) for number in range(rng.randint(1, 3))
        ),
        mishaps=_draw_mishaps(rng, num_workers, calm_from_s),
        loss=is_bad * rng.choice([0, 0.002, 0.01]),
        repeat=is_bad * rng.choice([0, 0.002, 0.01]),
        reorder=is_bad * rng.choice([0, 0.002, 0.01]),
        delay_s=rng.choice([0.0001, 0.001, 0.01]),
        jitter_s=rng.choice([0, 0.001, 0.02]),
        calm_from_s=calm_from_s,
    )


def _draw_config(rng: random.Random, model: FakeModel, num_workers: int) -> ServiceConfig:
    return ServiceConfig(
        workers=tuple(f"worker:{number}" for number in range(num_workers)),
        host="127.0.0.1",
        port=0,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        long_prefill_token_threshold=rng.choice([0, 0, 4]),
        enable_prefix_caching=rng.random() < 0.8,
        lookahead=rng.choice([0, 1, 1, 2]),
        max_grant=rng.choice([0, 4, 16]),
        state_check_interval=rng.choice([0, 1, 5]),
        step_timeout_s=STEP_TIMEOUT_S,
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        policy=rng.choice(list(Policy)),
        cache_policy=[*CachePolicy][model.num_blocks % len(CachePolicy)],
        preemption=rng.choice(list(Preemption)) if model.num_host_blocks else Preemption.RECOMPUTE,
        priority_ageing_s=rng.choice([0.5, 10.0]),
        max_waiting_requests=rng.choice([0, 0, 4]),
        max_waiting_requests_per_tenant=rng.choice([0, 0, 3]),
    )


def _draw_client(
    rng: random.Random, model: FakeModel, until_s: float, number: int
) -> tuple[Ask, ...]:
    asks = []
    for _ in range(rng.randint(2, 10)):
        ask = _draw_ask(rng, model, until_s)
        asks.append(ask)
        if rng.random() < 0.2:  # several answers to one prompt
            asks[-1] = ask = replace(ask, fork_group=f"{number}-{len(asks)}")
            asks += [replace(ask, seed=rng.getrandbits(60)) for _ in range(rng.randint(1, 3))]
    return tuple(sorted(asks, key=lambda ask: ask.at_s))


def _draw_ask(rng: random.Random, model: FakeModel, until_s: float) -> Ask:
    length = rng.randint(1, model.max_model_len - 1)
    family = rng.randrange(3)
    prompt = [(position * 7 + family) % VOCAB_SIZE for position in range(length)]
    if rng.random() < 0.5:
        prompt[-1] = rng.randrange(VOCAB_SIZE)
    max_tokens = rng.randint(1, 24)
    return Ask(
        at_s=rng.uniform(0, until_s) if rng.random() < 0.7 else 0.0,
        prompt=tuple(prompt),
        max_tokens=max_tokens if rng.random() < 0.9 else None,
        min_tokens=rng.choice([0, 0, 0, max_tokens]),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 0, 3]))),
        ignore_eos=rng.random() < 0.2,
        seed=rng.getrandbits(60),
        timeout_s=rng.uniform(0.1, 5.0) if rng.random() < 0.15 else None,
        priority=rng.randint(-1, 1),
        tenant=rng.choice("ab"),
        gives_up_after_s=rng.uniform(0.0, 2.0) if rng.random() < 0.1 else None,
        cache_salt=rng.choice(["", "", "", "salt"]),
        skip_prefix_cache=rng.random() < 0.1,
    )


def _draw_mishaps(rng: random.Random, num_workers: int, until_s: float) -> tuple[Mishap, ...]:
    usual = [name for name in MISHAPS if name != "death"]
    mishaps = [
        Mishap(
            at_s=rng.uniform(0, until_s),
            worker=rng.randrange(num_workers),
            name=rng.choice(usual),
            lasts_s=rng.choice([0.05, 0.5, 3.0, 14.0]) * rng.uniform(0.5, 1.5),
        )
        for _ in range(rng.choice([0, 1, 2, 3, 5]))
    ]
    if num_workers > 1 and rng.random() < 0.2:  # the first worker must hold all
        last = Mishap(at_s=until_s, worker=num_workers - 1, name="death", lasts_s=0.0)
        mishaps = [*(m for m in mishaps if m.name != "smaller"), last]
    return tuple(sorted(mishaps, key=lambda mishap: mishap.at_s))


# --- failures, and their end ---------------------------------------------------------------------

Act = Callable[[VirtualWorker], None]


def _nothing(worker: VirtualWorker) -> None:
    pass


def _part(worker: VirtualWorker) -> None:
    worker.weather.is_parted = True


def _part_upwards(worker: VirtualWorker) -> None:
    worker.weather.is_parted_upwards = True


def _rejoin(worker: VirtualWorker) -> None:
    worker.weather.is_parted = worker.weather.is_parted_upwards = False


def _slow_down(worker: VirtualWorker) -> None:
    worker.slowness = 20.0


def _speed_up(worker: VirtualWorker) -> None:
    worker.slowness = 1.0


def _kill_and_restart(worker: VirtualWorker) -> None:
    worker.crash()
    worker.restart()


def _return_smaller(worker: VirtualWorker) -> None:
    fewer = max(6, worker.model.num_blocks // 2)
    worker.model = replace(worker.model, num_blocks=fewer)
    worker.restart()


def _fault(name: str, count: int = 1) -> Act:
    def act(worker: VirtualWorker) -> None:
        setattr(worker.faults, name, count)

    return act


MISHAPS: dict[str, tuple[Act, Act]] = {
    "crash": (VirtualWorker.crash, VirtualWorker.restart),
    "vanish": (lambda worker: worker.crash(is_noticed=False), VirtualWorker.restart),
    "smaller": (VirtualWorker.crash, _return_smaller),
    "death": (VirtualWorker.crash, _nothing),
    "stop": (VirtualWorker.stop, VirtualWorker.go_on),
    "reset": (VirtualWorker.reset_connection, _nothing),
    "partition": (_part, _rejoin),
    "partition upwards": (_part_upwards, _rejoin),
    "slow": (_slow_down, _speed_up),
    "hang": (_fault("hang"), _kill_and_restart),
    "failed step": (_fault("fail"), _nothing),
    "failed steps": (_fault("fail", 4), _nothing),
    "short answer": (_fault("short"), _nothing),
    "bad row": (_fault("bad_row"), _nothing),
    "wrong state": (_fault("wrong_state"), _nothing),
}


def calm(weather: Weather) -> None:
    """Ends all network failures."""
    weather.loss = weather.repeat = weather.reorder = 0.0
    weather.is_parted = weather.is_parted_upwards = False
