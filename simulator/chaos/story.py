"""Runs one scenario under virtual time: the production scheduler, its clients, and all failures.

Engine, worker groups, links and the core are the production code; streams, workers and the clock
are simulated.
"""

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

import grpc.aio
import numpy as np

from scheduler_svc.clients.outbox import Outbox
from scheduler_svc.core import Refused, Request, Scheduler
from scheduler_svc.engine import Engine, NotReady, QueueFull
from scheduler_svc.sampling import Sampling
from simulator.chaos import virtual_time
from simulator.chaos.history import ClientHistory, HistoryRules, judge
from simulator.chaos.scenario import MISHAPS, Ask, Mishap, Scenario, calm, draw
from simulator.chaos.virtual_network import Channel, Weather
from simulator.chaos.virtual_worker import VirtualWorker

PATIENCE_S = 400.0  # of the watchdog, in virtual seconds after the last failure
DEADLINE_SLACK_S = 0.05


class Wrong(Exception):
    """Raised when a run violates a rule; names its seed."""


@dataclass(slots=True)
class RunCounts:
    """Counts of a finished run."""

    num_requests: int = 0
    num_refused: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_recoveries: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    digest: str = ""


class ScenarioRun:
    """One scenario while it runs."""

    def __init__(self, scenario: Scenario, check: Callable[[Scheduler], None] | None) -> None:
        self._scenario = scenario
        self._check = check
        self._rng = random.Random(scenario.seed + 1)
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._workers = {
            address: self._make_worker(address, num_blocks)
            for address, num_blocks in zip(scenario.addresses, scenario.num_blocks, strict=True)
        }
        self._histories: list[ClientHistory] = []
        self._num_refused = 0

    def _make_worker(self, address: str, num_blocks: int) -> VirtualWorker:
        scenario = self._scenario
        weather = Weather(
            scenario.delay_s, scenario.jitter_s, scenario.loss, scenario.repeat, scenario.reorder
        )
        model = replace(scenario.model, num_blocks=num_blocks)
        return VirtualWorker(address, model, scenario.step_time, weather, self._rng)

    async def run(self) -> RunCounts:
        """Runs from the first request to the last end. Raises Wrong."""
        self._engine = Engine(self._scenario.config, self._open_channel)
        serving = asyncio.create_task(self._engine.run())
        happening = asyncio.create_task(self._happen())
        try:
            async with asyncio.timeout(self._scenario.calm_from_s + PATIENCE_S):
                await asyncio.wait({serving, happening}, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    await serving
                    raise Wrong("the engine came to its end")
                await happening
        except TimeoutError:
            unfinished = [h.request.request_id for h in self._histories if not h.is_over]
            raise Wrong(f"stuck: {', '.join(unfinished) or 'no request'} waits") from None
        finally:
            serving.cancel()
            happening.cancel()
            await asyncio.gather(serving, happening, return_exceptions=True)
        return self._counts()

    async def _happen(self) -> None:
        """Runs all clients and failures of the scenario, then waits a moment."""
        scenario = self._scenario
        mishaps = (self._mishap(mishap) for mishap in scenario.mishaps)
        clients = (self._client(asks) for asks in scenario.clients)
        await asyncio.gather(*mishaps, *clients, self._calm_down())
        await asyncio.sleep(1.0)

    def _open_channel(self, address: str) -> grpc.aio.Channel:
        channel = Channel(self._workers[address], self._rng)
        return cast(grpc.aio.Channel, channel)  # implements the part that a scheduler uses

    # --- clients ---------------------------------------------------------------------------------

    async def _client(self, asks: tuple[Ask, ...]) -> None:
        client, outbox = self._engine.open_client()
        by_handle: dict[int, ClientHistory] = {}
        reading = asyncio.create_task(self._read(outbox, by_handle))
        asking = [
            asyncio.create_task(self._ask(ask, client, handle, by_handle))
            for handle, ask in enumerate(asks)
        ]
        await asyncio.gather(*asking)
        while not all(history.is_over for history in by_handle.values()):
            await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        self._engine.close_client(client, [])

    async def _ask(
        self, ask: Ask, client: int, handle: int, by_handle: dict[int, ClientHistory]
    ) -> None:
        await asyncio.sleep(ask.at_s)
        for _ in range(200):
            request = self._request(ask, client, handle)
            history = by_handle[handle] = ClientHistory(request, self._loop.time())
            try:
                self._engine.submit(request)
            except NotReady:
                await asyncio.sleep(0.2)
            except QueueFull as overloaded:
                await asyncio.sleep(overloaded.retry_after_s)
            except Refused:  # too large for this worker
                break
            else:
                self._histories.append(history)
                await self._perhaps_give_up(ask, history)
                return
            del by_handle[handle]
        by_handle.pop(handle, None)
        self._num_refused += 1

    def _request(self, ask: Ask, client: int, handle: int) -> Request:
        now_s = self._loop.time()
        return Request(
            request_id=f"c{client}-{handle}",
            prompt_token_ids=np.array(ask.prompt, dtype=np.int32),
            max_tokens=ask.max_tokens,
            min_tokens=ask.min_tokens,
            stop_token_ids=ask.stop_token_ids,
            ignore_eos=ask.ignore_eos,
            sampling=Sampling(1.0, 1.0, 0, 0.0, ask.seed),
            client=client,
            handle=handle,
            arrival_s=now_s,
            deadline_s=None if ask.timeout_s is None else now_s + ask.timeout_s,
            priority=ask.priority,
            tenant=ask.tenant,
            cache_salt=ask.cache_salt,
            skip_prefix_cache=ask.skip_prefix_cache,
            fork_group=ask.fork_group,
        )

    async def _perhaps_give_up(self, ask: Ask, history: ClientHistory) -> None:
        if ask.gives_up_after_s is None:
            return
        await asyncio.sleep(ask.gives_up_after_s)
        if not history.ends and self._engine.abort(history.request.request_id):
            history.aborted_s = self._loop.time()

    async def _read(self, outbox: Outbox, by_handle: dict[int, ClientHistory]) -> None:
        while True:
            parcel = await outbox.take()
            for handle, token in zip(
                parcel.handles.tolist(), parcel.token_ids.tolist(), strict=True
            ):
                history = by_handle[handle]
                history.num_tokens_after_end += bool(history.ends)
                history.tokens.append(token)
            for ended in parcel.ended:
                history = by_handle[ended.finished.request.handle]
                history.ends.append((self._loop.time(), ended.finished))
            self._check_books()
            await asyncio.sleep(self._rng.choice([0, 0, 0.001, 0.1]))

    # --- mishaps ---------------------------------------------------------------------------------

    async def _mishap(self, mishap: Mishap) -> None:
        worker = self._workers[self._scenario.addresses[mishap.worker]]
        begin, end = MISHAPS[mishap.name]
        await asyncio.sleep(mishap.at_s)
        begin(worker)
        await asyncio.sleep(mishap.lasts_s)
        end(worker)

    async def _calm_down(self) -> None:
        """Ends all failures at the scenario's time; from then on every request must succeed."""
        await asyncio.sleep(self._scenario.calm_from_s)
        for worker in self._workers.values():
            calm(worker.weather)

    # --- the end ---------------------------------------------------------------------------------

    def _cores(self) -> Iterator[Scheduler]:
        for group in self._engine.groups:
            if group.core is not None:
                yield group.core

    def _check_books(self) -> None:
        if self._check is not None:
            for core in self._cores():
                self._check(core)

    def _counts(self) -> RunCounts:
        scenario, engine = self._scenario, self._engine
        num_recoveries = sum(group.num_recoveries for group in engine.groups)
        rules = HistoryRules(
            vocab_size=scenario.model.vocab_size,
            max_model_len=scenario.model.max_model_len,
            eos_token_ids=scenario.model.eos_token_ids,
            deadline_slack_s=DEADLINE_SLACK_S + 0.2,
            may_give_up=num_recoveries >= 3,
            may_outgrow=any(mishap.name == "smaller" for mishap in scenario.mishaps),
            num_bad_rows=sum(len(worker.bad_rows) for worker in self._workers.values()),
        )
        problems = [*judge(self._histories, rules), *self._left_over()]
        if problems:
            raise Wrong("\n  ".join(problems))
        reasons = [h.ends[0][1].reason.value if h.ends else "abort" for h in self._histories]
        seen = [(h.request.request_id, h.tokens, h.ends and h.ends[0][0]) for h in self._histories]
        return RunCounts(
            num_requests=len(self._histories),
            num_refused=self._num_refused,
            num_tokens=sum(len(history.tokens) for history in self._histories),
            num_steps=sum(worker.num_steps for worker in self._workers.values()),
            num_recoveries=num_recoveries,
            ends=Counter(reasons),
            virtual_s=self._loop.time() - self._began_s,
            digest=hashlib.sha256(repr(seen).encode()).hexdigest()[:16],
        )

    def _left_over(self) -> Iterator[str]:
        for core in self._cores():
            if num_held := core.view.num_blocks - core.view.num_free_blocks:
                yield f"{num_held} blocks are still held"
            if core.num_waiting or core.num_running or core.num_in_flight:
                yield f"{core.num_waiting} wait and {core.num_running} run, without a client"


def run_seed(seed: int, check: Callable[[Scheduler], None] | None = None) -> RunCounts:
    """Runs a seed's scenario. Raises Wrong; `check` is called with every core from time to time."""

    try:
        return run_scenario(draw(seed), check)
    except Exception as error:
        raise Wrong(f"seed {seed}: {error}") from error


def run_scenario(scenario: Scenario, check: Callable[[Scheduler], None] | None = None) -> RunCounts:
    """Runs a scenario, as `run_seed` does."""

    async def main() -> RunCounts:
        return await ScenarioRun(scenario, check).run()

    return virtual_time.run(main())
