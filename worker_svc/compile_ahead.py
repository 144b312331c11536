"""Kernels compiled by helper processes while the worker reads its weights.

Compiled one after the other, kernels take most of a first start. Each helper builds the model's
shape with one layer and no weights and runs its share of the steps that the worker will rehearse.
What it compiles lies then in Triton's cache on disk, where the worker finds it. A mark in that
cache says that all of it is there, so that later starts need no helper. A helper that fails costs
nothing but its share of the gain.
"""

import argparse
import dataclasses
import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from worker_svc import model_config
from worker_svc.step import Limits

log = logging.getLogger(__name__)

MAX_HELPERS = 12
WAIT_S = 120.0
_SOURCES = Path(__file__).parents[1] / "kernels"
_MODULE = "worker_svc.compile_ahead"


class CompileAhead:
    """The helpers of one start-up."""

    def __init__(self, children: "list[subprocess.Popen[bytes]]", mark: Path) -> None:
        self._children = children
        self._mark = mark
        self._started_s = time.monotonic()

    def wait(self) -> None:
        """Returns when all helpers have ended: until then they take memory on the device."""
        deadline_s = self._started_s + WAIT_S
        codes = []
        for child in self._children:
            try:
                codes.append(child.wait(max(0.0, deadline_s - time.monotonic())))
            except subprocess.TimeoutExpired:
                child.kill()
                codes.append(child.wait())
        took_s = time.monotonic() - self._started_s
        log.info("kernels compiled by %d processes in %.1f s", len(codes), took_s)
        if any(codes):
            log.warning("%d of them failed; the worker compiles the rest", sum(map(bool, codes)))
        else:
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.touch()


def start(folder: Path, dtype: torch.dtype, limits: Limits) -> CompileAhead | None:
    """Starts the helpers for a model on CUDA; None if everything is compiled already."""
    mark = _cache_folder() / f"pagewire-{_key(folder, dtype, limits)}"
    if mark.exists():
        return None
    count = max(1, min(MAX_HELPERS, (os.cpu_count() or 1) - 2))
    job = {"folder": str(folder), "dtype": str(dtype).removeprefix("torch."), "count": count}
    job["limits"] = dataclasses.asdict(limits)
    children = [
        subprocess.Popen(
            [sys.executable, "-m", _MODULE, json.dumps(job), str(share)],
            cwd=_SOURCES.parent,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for share in range(count)
    ]
    return CompileAhead(children, mark)


def compile_share(folder: Path, dtype: torch.dtype, limits: Limits, share: int, count: int) -> None:
    """Runs one helper's part of what a worker rehearses."""
    from worker_svc.cuda_runner import CudaRunner  # noqa: PLC0415 - Triton is only where CUDA is
    from worker_svc.kv_cache import KVCache  # noqa: PLC0415
    from worker_svc.models import Decoder  # noqa: PLC0415

    device = torch.device("cuda")
    config = dataclasses.replace(model_config.load(folder), num_layers=1)
    model = Decoder(config, dtype, device, limits.max_model_len)
    model.pack()
    if model.fused is None:
        return
    kv_cache = KVCache(
        num_layers=1,
        num_blocks=1,
        block_size=limits.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )
    prefills, decodes = CudaRunner(model, kv_cache, limits, device).rehearsals()
    # Prefills have little in common; decodes of nearly the same size share their kernels.
    begin, end = (len(decodes) * part // count for part in (share, share + 1))
    with torch.inference_mode():
        for rehearse in (*prefills[share::count], *decodes[begin:end]):
            rehearse()
    torch.cuda.synchronize(device)


def _cache_folder() -> Path:
    named = os.environ.get("TRITON_CACHE_DIR")
    return Path(named) if named else Path.home() / ".triton" / "cache"


def _key(folder: Path, dtype: torch.dtype, limits: Limits) -> str:
    """Everything that decides which kernels there are."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for source in sorted(_SOURCES.glob("*.py")):
        digest.update(source.read_bytes())
    shape = dataclasses.replace(limits, num_blocks=0)  # no kernel looks at it
    facts = (dtype, shape, torch.__version__, torch.cuda.get_device_name())
    digest.update(repr(facts).encode())
    return digest.hexdigest()[:24]


def main(arguments: Sequence[str]) -> int:
    """Entry point of a helper."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    parser.add_argument("job", type=json.loads, help="what the worker is about to serve")
    parser.add_argument("share", type=int, help="which part of it this process compiles")
    options = parser.parse_args(arguments)
    job = options.job
    dtype, limits = getattr(torch, job["dtype"]), Limits(**job["limits"])
    compile_share(Path(job["folder"]), dtype, limits, options.share, job["count"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
