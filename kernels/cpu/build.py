"""Compiles C source to a shared library, once per machine, in a cache folder.

Several processes may build the same library at once: each compiles in a folder of its own and
renames the result into place. Independent of the content of the source.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COMPILE_TIMEOUT_S = 600.0  # about 30 times the time on a busy desktop
FLAGS = (
    "-std=gnu11", "-O3", "-fopenmp", "-fPIC", "-ffp-contract=fast", "-fno-math-errno",
    "-fno-trapping-math", "-Wno-psabi",
    # Otherwise only a warning, which is not shown here: a pointer made from an integer.
    "-Werror=int-conversion", "-Werror=incompatible-pointer-types",
)  # fmt: skip

log = logging.getLogger(__name__)


class BuildFailed(RuntimeError):
    """No library could be built; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Compiler, OpenMP runtime and cache folder."""

    compiler: str
    openmp: Path  # the runtime that this process has loaded
    cache: Path

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> "Toolchain":
        """Finds $CC or cc, and the OpenMP runtime of this process. Raises BuildFailed."""
        name = environment.get("CC") or "cc"
        compiler = shutil.which(name, path=environment.get("PATH"))
        if compiler is None:
            raise BuildFailed(f"there is no C compiler `{name}`")
        return cls(compiler, _loaded_openmp(), cache_folder(environment))


def can_compile(environment: Mapping[str, str]) -> bool:
    """True if a compiler exists; it may still fail."""
    try:
        Toolchain.find(environment)
    except BuildFailed:
        return False
    return True


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The folder of compiled libraries, inside the user's cache folder."""
    if root := environment.get("PAGEWIRE_CACHE"):
        return Path(root) / "kernels"
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "pagewire" / "kernels"


def library(source: Path, flags: Sequence[str], toolchain: Toolchain) -> Path:
    """Path of the compiled library, from the cache or compiled now. Raises BuildFailed."""
    key = _key(source, flags, toolchain)
    path = toolchain.cache / f"{source.stem}-{key}.so"
    if not path.exists():
        began_s = time.monotonic()
        log.info("compiling %s for this machine; this happens once", source.name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
                _compile(source, flags, toolchain, Path(folder)).rename(path)
        except OSError as error:
            raise BuildFailed(f"{path.parent}: {error}") from error
        log.info("compiled %s in %.1f s: %s", source.name, time.monotonic() - began_s, path)
    return path


def _compile(source: Path, flags: Sequence[str], toolchain: Toolchain, folder: Path) -> Path:
    compiled, linked = folder / "object.o", folder / "library.so"
    cc = toolchain.compiler
    # Two commands, since linking with -fopenmp would add a second OpenMP runtime to the process:
    # twice the threads, competing for the same cores.
    _run(cc, *FLAGS, *flags, "-c", str(source), "-o", str(compiled))
    _run(
        cc, "-shared", "-Wl,-z,defs", str(compiled), str(toolchain.openmp), "-lm", "-o", str(linked)
    )
    return linked


def _key(source: Path, flags: Sequence[str], toolchain: Toolchain) -> str:
    """A key of everything that the library depends on; flags include the instruction set."""
    facts = [
        *(path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))),
        *FLAGS,
        *flags,
        toolchain.openmp.name,  # all that the library keeps of it: another folder's does as well
        _run(toolchain.compiler, "--version"),
        platform.machine(),
    ]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def _loaded_openmp() -> Path:
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    for line in lines:
        name = line.split(maxsplit=5)[-1]
        if os.path.basename(name).startswith("libgomp"):
            return Path(name)
    raise BuildFailed("torch has loaded no GNU OpenMP runtime to link with")


def _run(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildFailed(f"{command[0]} failed: {done.stderr.strip()[:500]}")
    return done.stdout
