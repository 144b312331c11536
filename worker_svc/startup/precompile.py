"""Compiles kernels in a helper process while the worker imports torch and reads its weights.

Compiling dominates a first start. `kernel_compiler` finds the kernels that this worker will launch
and stores them in Triton's cache on disk. A marker file in that cache records that it is complete,
so that later starts need no helper. If the helper fails, the worker compiles the kernels itself.
This module does not load torch: the helper must start before the worker spends seconds on that.
"""

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import worker_svc
from pagewire.gguf.files import is_gguf
from worker_svc.config import WorkerConfig, kernel_cache
from worker_svc.device.gpu_facts import Gpu, gpus, only_kind

log = logging.getLogger(__name__)

WAIT_S = 120.0
_ROOT = Path(worker_svc.__file__).parents[1]
_SOURCES = ("kernels", "worker_svc")
_PACKAGES = ("torch", "triton")
# Options that change the kernels.
SHAPING = (
    "kv_cache_dtype",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "tensor_parallel_size",
    "all_reduce",
    "attention_backend",
    "kv_groups",
    "ignore_config_keys",
)
_MODULE = "worker_svc.startup.kernel_compiler"


@dataclass(frozen=True, slots=True)
class Job:
    """Parameters that determine the kernels."""

    folder: Path
    dtype: str  # a value of the option, possibly "auto"
    config: WorkerConfig
    arch: int  # compute capability, major * 10 + minor

    def dump(self) -> str:
        values = {name: getattr(self.config, name) for name in SHAPING}
        return json.dumps([str(self.folder), self.dtype, values, self.arch])

    @classmethod
    def parse(cls, text: str) -> "Job":
        folder, dtype, values, arch = json.loads(text)
        values["ignore_config_keys"] = tuple(values["ignore_config_keys"])  # JSON has lists
        return cls(Path(folder), dtype, WorkerConfig(**values), arch)


class Precompile:
    """The helper process of one start; a thread reaps it."""

    def __init__(self, child: "subprocess.Popen[bytes]", mark: Path) -> None:
        self._child = child
        self._mark = mark
        self._deadline_s = time.monotonic() + WAIT_S
        self._watch = threading.Thread(target=self._reap, name="compile-ahead", daemon=True)
        self._watch.start()

    def wait(self) -> None:
        """Waits for the helper; after it, launches find their kernels in Triton's cache."""
        self._watch.join(max(0.0, self._deadline_s - time.monotonic()))
        if code := self.stop():
            log.warning(
                "precompilation ended with exit code %d: the worker compiles the rest", code
            )

    def stop(self) -> int:
        """Kills the helper and its forks if they still run; returns its exit code."""
        if self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
        self._watch.join()
        return int(self._child.returncode)

    def _reap(self) -> None:
        if self._child.wait() == 0:
            with contextlib.suppress(OSError):  # without a marker the next start repeats this
                self._mark.parent.mkdir(parents=True, exist_ok=True)
                self._mark.touch()


def start(
    config: WorkerConfig, folder: Path, dtype: str = "", found: Sequence[Gpu] | None = None
) -> Precompile | None:
    """Starts the helper; None if all kernels are compiled, or the GPUs are unknown or differ.

    `dtype` overrides the configuration's, `found` are the machine's GPUs. One helper compiles for
    all ranks.
    """
    gpu = only_kind(gpus() if found is None else found)
    if gpu is None or config.device == "cpu" or config.enforce_eager:
        return None  # there are no graphs, of whose kernels the helper knows
    if _is_quantized(config, folder):
        return None
    job = Job(folder.absolute(), dtype or config.dtype, config, gpu.arch)
    try:
        mark = kernel_cache() / f"pagewire-{key(job, gpu)}"
    except OSError:  # loading the model will report the error
        return None
    if mark.exists():
        return None
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", _MODULE, job.dump()],
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    return Precompile(child, mark)


def _is_quantized(config: WorkerConfig, folder: Path) -> bool:
    """True if the kernels depend on the weights, of which the helper has none."""
    if is_gguf(folder):
        return True
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # loading the model will report the error
        return False
    is_stored = isinstance(raw, dict) and bool(raw.get("quantization_config"))
    return is_stored or config.quantization != "auto"


def key(job: Job, gpu: Gpu) -> str:
    """A digest of everything that determines the kernels."""
    digest = hashlib.sha256((job.folder / "config.json").read_bytes())
    for package in _SOURCES:
        for source in sorted((_ROOT / package).rglob("*.py")):
            digest.update(source.read_bytes())
    versions = [_version(package) for package in _PACKAGES]
    shaping = [getattr(job.config, name) for name in SHAPING]
    digest.update(repr((job.dtype, shaping, gpu, versions)).encode())
    return digest.hexdigest()[:24]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
