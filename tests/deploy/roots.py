"""Processes with a root, a user and namespaces of their own, as a container has them.

The command line that these functions make becomes the process: signals and exit status are its own.
"""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# This Python stands in for that of a base image.
PYTHON = Path(sys.base_prefix)
OWN = ("bin", "lib")
# What a base image has: libraries, and programs, which images without a base have not.
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/etc/ssl")
PROGRAMS = ("/bin", "/etc/alternatives", "/sbin", "/usr/bin", "/usr/include", "/usr/libexec")


def base(*, with_programs: bool) -> dict[str, str]:
    """Paths of this machine that stand in for a base image, by where they appear."""
    shared = [*LIBRARIES, *(PROGRAMS if with_programs else ())]
    binds = {path: path for path in shared if Path(path).exists()}
    # In addition at its own place, where its library and environments look for it.
    return binds | {str(PYTHON): "/usr/local"} | {f"{PYTHON}/{p}": f"{PYTHON}/{p}" for p in OWN}


def command(steps: Sequence[Sequence[str]], last: Sequence[str], *options: str) -> list[str]:
    """A command that follows `steps` in a mount namespace of its own and then becomes `last`.

    The options are those of unshare, for further namespaces.
    """
    # Full paths, since the variables, PATH among them, are those of the last one.
    found = [[shutil.which(step[0]) or step[0], *step[1:]] for step in [*steps, last]]
    found[-1].insert(0, "exec")
    script = " && ".join(shlex.join(step) for step in found)
    unshare = shutil.which("unshare") or "unshare"
    return [unshare, "--mount", *options, "/bin/sh", "-c", script]


def bound(root: Path, binds: Mapping[str, str]) -> list[list[str]]:
    """Steps that show paths of this machine in a root, and make what they need for it."""
    steps = []
    for source, where in binds.items():
        target = root / where.lstrip("/")
        if Path(source).is_dir():
            steps.append(["mkdir", "-p", str(target)])
        else:
            steps.append(["mkdir", "-p", str(target.parent)])
            steps.append(["touch", str(target)])
        steps.append(["mount", "--rbind", source, str(target)])
    return steps
