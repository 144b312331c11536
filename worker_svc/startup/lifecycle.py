"""Phases of a worker: load the model, allocate the cache, warm up, serve.

Owns the phase and the order of calls; `startup` builds the parts that each phase needs. Does not
use gRPC or the step stream.
"""

import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TypeVar

from pagewire.gguf.header import BadGguf
from pagewire.ranks.byte_pairs import BadRanks
from worker_svc.config import UnsupportedOption, WorkerConfig
from worker_svc.models.spec import UnsupportedModel
from worker_svc.models.stored.weight_files import WeightError
from worker_svc.moves.peer_fetches import PeerFetches
from worker_svc.moves.transport import OwnKv
from worker_svc.parallel.group import Group
from worker_svc.parallel.leader import Ranks
from worker_svc.process.compute_thread import ComputeThread
from worker_svc.process.start_timer import StartTimer
from worker_svc.quantization.scheme import UnsupportedQuantization
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import startup
from worker_svc.startup.description import Description, ModelFacts
from worker_svc.startup.kv_sizing import CacheTooSmall
from worker_svc.startup.precompile import Precompile
from worker_svc.startup.startup import LoadedModel

T = TypeVar("T")

# Errors of a request that cannot be satisfied: the message is enough, no traceback is logged.
REFUSALS = (
    BadGguf,
    BadRanks,
    CacheTooSmall,
    FileNotFoundError,
    UnsupportedModel,
    UnsupportedOption,
    UnsupportedQuantization,
    WeightError,
)

log = logging.getLogger(__name__)


class WorkerPhase(Enum):
    """Start-up progress of a worker; the names are those in the protocol."""

    STARTED = "STARTED"
    LOADING = "LOADING"
    LOADED = "LOADED"
    CACHE_READY = "CACHE_READY"
    READY = "READY"
    FAILED = "FAILED"


class WrongPhase(RuntimeError):
    """A call is not allowed in the worker's current phase."""


class Lifecycle:
    """Owns the phases, entered in order. A call that fails restores the phase before it."""

    def __init__(
        self,
        config: WorkerConfig,
        compute: ComputeThread,
        on_phase: Callable[[WorkerPhase], None],
        ranks: Ranks,
        address: str,
    ) -> None:
        self._ranks = ranks
        self._address = address
        self._config = config
        self._compute = compute
        self._on_phase = on_phase
        self._timer = StartTimer()
        self.peers: PeerFetches | None = None  # if KV moves between workers
        self._incarnation = secrets.randbits(63) + 1
        self._busy = threading.Lock()
        self._phase = WorkerPhase.STARTED
        self._failure = ""
        self._model: LoadedModel | None = None
        self._runner: ModelRunner | None = None
        self._description: Description | None = None

    @property
    def phase(self) -> WorkerPhase:
        return self._phase

    @property
    def failure(self) -> str:
        """The reason why start-up failed; empty if it did not."""
        return self._failure

    @property
    def description(self) -> Description | None:
        """The worker's description from CACHE_READY on; None before."""
        return self._description

    @property
    def runner(self) -> ModelRunner | None:
        """The runner from CACHE_READY on; None before."""
        return self._runner

    def ready_runner(self) -> ModelRunner:
        """The runner that executes steps. Raises WrongPhase unless the worker is READY."""
        if self._runner is None or self._phase is not WorkerPhase.READY:
            raise WrongPhase(f"steps need phase READY, the worker is {self._phase.value}")
        return self._runner

    def load_model(
        self,
        folder: Path,
        dtype: str,
        served_model_name: str,
        compiling: Precompile | None = None,
    ) -> ModelFacts:
        """STARTED to LOADED: reads the weights. `compiling` is a precompilation already begun."""
        with self._moving(
            "LoadModel", WorkerPhase.STARTED, WorkerPhase.LOADED, during=WorkerPhase.LOADING
        ):
            self._ranks.load_model(folder, dtype, served_model_name)
            with self._timer.phase("weights"):
                self._model = self._together(
                    lambda group: startup.load(
                        self._config, folder, dtype, served_model_name, group, compiling
                    )
                )
            return self._model.facts

    def initialize_cache(self, num_blocks: int) -> int:
        """LOADED to CACHE_READY: allocates num_blocks, for 0 as many as fit; returns the number."""
        with self._moving("InitializeCache", WorkerPhase.LOADED, WorkerPhase.CACHE_READY):
            model = self._model
            assert model is not None  # set in phase LOADED
            with self._timer.phase("kernels"):
                startup.finish_compiling(model)
            self._ranks.initialize_cache(num_blocks)
            with self._timer.phase("cache"):
                runner = self._together(
                    lambda group: startup.build_runner(self._config, model, num_blocks)
                )
            description = startup.describe(model, runner, self._incarnation)
            if self.peers is not None:
                kv = OwnKv(
                    runner.kv_cache, runner.device, self._incarnation, description.kv_layout_hash
                )
                description = replace(description, kv_handles=self.peers.begin(kv))
            addresses = self._ranks.addresses(self._address)
            self._description = replace(description, rank_addresses=addresses)
            self._runner = runner
            return runner.limits.num_blocks

    def warm_up(self) -> Description:
        """CACHE_READY to READY: rehearses the largest steps; returns the final description."""
        with self._moving("WarmUp", WorkerPhase.CACHE_READY, WorkerPhase.READY):
            runner, description = self._runner, self._description
            assert runner is not None and description is not None  # set in phase CACHE_READY
            self._ranks.warm_up()
            with self._timer.phase("warm-up"):
                self._together(lambda group: runner.warm_up())
            self._description = replace(description, rehearsed_s=runner.rehearsed_s)
            log.info("ready after %s", self._timer.report())
            return self._description

    def start_up(self, folder: Path, compiling: Precompile | None = None) -> None:
        """Runs all three phases with the configured model; on an error FAILED with its reason."""
        try:
            config = self._config
            self.load_model(folder, config.dtype, config.served_model_name, compiling)
            self.initialize_cache(self._config.num_kv_blocks)
            self.warm_up()
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            is_surprise = not isinstance(error, REFUSALS)
            log.error("start-up failed: %s", self._failure, exc_info=is_surprise)
            self._enter(WorkerPhase.FAILED)

    def _together(self, work: Callable[[Group], T]) -> T:
        """Runs work on every rank's compute thread; raises on all ranks if it failed on one."""

        def run() -> T:
            group = self._ranks.join(self._config.device, self._config.all_reduce)
            return group.together(lambda: work(group))

        return self._compute.call(run)

    @contextmanager
    def _moving(
        self, call: str, source: WorkerPhase, target: WorkerPhase, during: WorkerPhase | None = None
    ) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise WrongPhase(f"{call}: another life-cycle call is running")
        try:
            if self._phase is not source:
                raise WrongPhase(
                    f"{call} needs phase {source.value}, the worker is {self._phase.value}"
                )
            if during is not None:
                self._enter(during)
            try:
                yield
            except BaseException:
                self._enter(source)
                raise
            self._enter(target)
        finally:
            self._busy.release()

    def _enter(self, phase: WorkerPhase) -> None:
        if phase is not self._phase:
            self._phase = phase
            log.info("worker is %s", phase.value)
            self._on_phase(phase)
