"""Tunes GEMMs: chooses library algorithms that are faster than torch's and applies them."""

import torch

from kernels.gemm import cublas_lt
from worker_svc.config import kernel_cache
from worker_svc.device import gpu_facts
from worker_svc.models.fused import FusedDecoder
from worker_svc.models.fused_gemms import is_librarys
from worker_svc.parallel.group import Group
from worker_svc.protocol.step import Limits
from worker_svc.runner.graphs.decode_graphs import batch_sizes
from worker_svc.tuning import gemm_choice
from worker_svc.tuning.gemm_cache import GemmCache
from worker_svc.tuning.gemm_timing import GemmTimer

# Version of the search: after a change, stored results are measured again.
_SEARCH = 2


def choose(model: FusedDecoder, device: torch.device, limits: Limits, group: Group) -> None:
    """Chooses algorithms for the batch sizes of decode graphs and for the largest prefill step.

    The model uses them from then on.
    """
    weights = model.library_weights()
    counts = (*batch_sizes(limits.max_decode_rows), limits.max_step_tokens)
    wanted = gemm_choice.shapes(weights, counts, is_librarys)
    library = cublas_lt.open_on(device) if wanted else None
    # A layer's bias exists on rank 0 only, which can leave rank 0 with fewer shapes to tune.
    if not group.smallest(lambda: 0 if library is None else len(wanted)):
        return
    assert library is not None
    timer = GemmTimer(library, weights, device)
    cache = GemmCache(kernel_cache(), _key(library.version, device))
    choices = gemm_choice.choose(wanted, library, cache, timer.measure, group)
    model.tune(choices, gemm_choice.by_kind(choices, library, group))


def _key(library_version: int, device: torch.device) -> str:
    """A text of everything that affects the algorithms and their times."""
    name = torch.cuda.get_device_name(device)
    versions = f"driver {gpu_facts.driver_version()}, cuBLASLt {library_version}"
    return f"{name}, {versions}, search {_SEARCH}"
