"""`python -m worker_svc.startup.kernel_compiler`: compiles the kernels that a worker will launch.

It builds the model with few layers on torch's meta device, runs the steps that the worker will
rehearse, and compiles each new kernel in a forked process. It needs no GPU and no memory for
weights.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from kernels import compile_only
from kernels.comm.inboxes import Inboxes
from kernels.compile_only import Specialization
from worker_svc.attention.kv_plan import KvPlan
from worker_svc.config import WorkerConfig
from worker_svc.device.device import resolve_dtype, resolve_kv_dtype
from worker_svc.models import Decoder
from worker_svc.models import config as model_config
from worker_svc.models.sharding import Sharding
from worker_svc.models.spec import ModelSpec
from worker_svc.parallel.group import ALONE, Group
from worker_svc.parallel.peer_memory import PeerMemory, Slot, inbox_size
from worker_svc.protocol.step import Limits
from worker_svc.runner.cuda_runner import CudaRunner
from worker_svc.startup import kv_groups, startup
from worker_svc.startup.precompile import Job

log = logging.getLogger(__name__)

# Numbers of blocks: as in the profiling run, and too many for 32-bit offsets.
SMALL_CACHE, LARGE_CACHE = 1, 2**31


class Forks:
    """Concurrent calls, each in a forked process."""

    def __init__(self, max_processes: int) -> None:
        self._max_processes = max_processes
        self._running: set[int] = set()
        self.num_started = 0
        self.num_failed = 0

    def start(self, call: Callable[[], object]) -> None:
        """Starts a call; if the maximum is running, waits for one to end first."""
        while len(self._running) >= self._max_processes:
            self._reap()
        child = os.fork()
        if child == 0:
            _run_and_exit(call)
        self._running.add(child)
        self.num_started += 1

    def wait(self) -> None:
        """Waits for all calls."""
        while self._running:
            self._reap()

    def _reap(self) -> None:
        child, status = os.wait()
        self._running.discard(child)
        self.num_failed += status != 0


def _run_and_exit(call: Callable[[], object]) -> NoReturn:
    code = 1
    try:
        call()
        code = 0
    except Exception:
        log.exception("a kernel could not be precompiled")
    finally:
        os._exit(code)  # without clean-up of the parent's resources


def _know_shapes() -> torch.library.Library:
    """Defines the output shapes of a few operations on meta, for as long as the result lives.

    torch's own definitions would load parts of its compiler, which takes seconds.
    """
    shapes: dict[str, Callable[..., Tensor]] = {
        "mm": lambda x, w: x.new_empty((x.shape[0], w.shape[1])),
        "addmm": lambda _, x, w, **__: x.new_empty((x.shape[0], w.shape[1])),
        "addmm_": lambda total, *_, **__: total,
        "mul_.Tensor": lambda x, _: x,
        "embedding": lambda table, ids, *_: table.new_empty((*ids.shape, table.shape[1])),
        "empty_like": lambda x, dtype=None, **_: x.new_empty(x.shape, dtype=dtype),
    }
    library = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
    for operation, shape in shapes.items():
        library.impl(operation, shape, allow_override=True)  # type: ignore[no-untyped-call]
    return library


class Partners(Group):
    """A group with one rank in this process; collectives return tensors of the right shape."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def gather(self, part: Tensor) -> Tensor:
        gathered = None if self.peers is None else self.peers.gather(part)
        if gathered is not None:
            return gathered
        return part.new_empty((self.size, *part.shape))


def groups(config: WorkerConfig) -> Iterator[Group]:
    """The group as seen from each rank, with and without peer memory where both are possible."""
    size = config.tensor_parallel_size
    if size == 1:
        yield ALONE
        return
    nowhere = torch.empty(size, dtype=torch.int64, device="meta")
    for rank in range(size):
        yield Partners(rank, size)
        if config.all_reduce != "nccl":
            inboxes = Inboxes(nowhere, rank, size, inbox_size(size), len(Slot))
            yield Partners(rank, size, peers=PeerMemory(nowhere, inboxes))


def rehearse(job: Job, on_new: Callable[[Specialization], None]) -> None:
    """Calls `on_new` for each kernel that the worker will launch, in launch order."""
    compile_only.note_launches(job.arch, on_new)
    shape = model_config.load(job.folder, job.config.ignore_config_keys)
    dtype = resolve_dtype(job.dtype, torch.device("cuda"), shape.checkpoint_dtype)
    kv_dtype = resolve_kv_dtype(job.config.kv_cache_dtype, dtype)
    max_model_len = job.config.max_model_len or shape.max_model_len
    limits = startup.shape_limits(job.config, "cuda", max_model_len, shape.vocab_size)
    meta, _known = torch.device("meta"), _know_shapes()
    for group in groups(job.config):
        model = Decoder(shape.rehearsed(), dtype, meta, max_model_len, group, kv_dtype)
        model.pack()
        if model.fused is not None:
            has_one = kv_groups.has_one_table(job.config)
            _rehearse(model, limits, None if has_one else _plan(shape, model, limits))


def _plan(whole: ModelSpec, model: Decoder, limits: Limits) -> KvPlan | None:
    """The KV groups of the whole model, as the layers of a rehearsal see them."""
    spec = Sharding(whole, model.group.rank, model.group.size).spec
    plan = spec.kv_plan(limits.block_size, limits.max_model_len, model.kv_dtype)
    return plan and plan.of_layers(whole.rehearsed_layers)


def _rehearse(model: Decoder, limits: Limits, plan: KvPlan | None) -> None:
    prefills, decodes = _runner(model, limits, plan, SMALL_CACHE).rehearsals()
    # Decode kernels do not depend on the size of the cache.
    more_prefills, _ = _runner(model, limits, plan, LARGE_CACHE).rehearsals()
    with torch.inference_mode():
        for step in (*prefills, *more_prefills, *decodes):
            step()


def _runner(model: Decoder, limits: Limits, plan: KvPlan | None, num_blocks: int) -> CudaRunner:
    kv_cache = kv_groups.cache_for(model, plan, num_blocks, limits.block_size)
    return CudaRunner(model, kv_cache, kv_groups.with_groups(limits, plan), model.device)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m worker_svc.startup.kernel_compiler", description=__doc__
    )
    parser.add_argument("job", type=Job.parse, help="what the worker is about to serve")
    job = parser.parse_args(arguments).job
    forks = Forks(max(1, len(os.sched_getaffinity(0)) - 2))
    forks.start(compile_only.build_driver)
    rehearse(job, lambda found: forks.start(lambda: compile_only.build_launcher(found.compile())))
    forks.wait()
    return int(forks.num_failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
