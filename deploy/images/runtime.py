"""Makes the root of an image that has Python, an environment and the libraries they load: no shell.

    python runtime.py /opt/pagewire /runtime

Runs where the image is built. What the environment's programs load is found with `ldd`.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

# Of the standard library: what no service imports, and what was compiled for another mode.
LEFT_OUT = (
    *("test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "pydoc_data"),
    *("site-packages", "config-*", "__pycache__", "*.a", "_tkinter*.so", "_test*.so", "xx*.so"),
)
FILES = ("/etc/ssl/certs/ca-certificates.crt",)
WRITTEN = {
    "etc/passwd": "pagewire:x:10001:10001::/cache:/nonexistent\n",
    "etc/group": "pagewire:x:10001:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
    "etc/ld.so.conf": "/usr/local/lib\n",
}
SYSTEM = ("lib", "lib64", "usr")  # where the loader looks for libraries anyway
_LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x")


def main(environment: Path, root: Path) -> None:
    """Fills `root`. The environment itself is copied by the Dockerfile."""
    prefix = Path(sys.base_prefix)
    library = Path("lib") / f"python{sys.version_info.major}.{sys.version_info.minor}"
    binary = root / "usr" / "local" / "bin" / library.name
    binary.parent.mkdir(parents=True)
    shutil.copy2(prefix / "bin" / library.name, binary)
    for name in ("python", "python3"):
        (binary.parent / name).symlink_to(binary.name)
    ignored = shutil.ignore_patterns(*LEFT_OUT)
    shutil.copytree(prefix / library, root / "usr" / "local" / library, ignore=ignored)
    copied = root / "usr" / "local" / library / "lib-dynload"
    programs = [prefix / "bin" / library.name, *copied.glob("*.so"), *environment.rglob("*.so*")]
    for path in sorted(_libraries(programs, environment)):
        where = path.parent if path.parts[1] in SYSTEM else Path("/usr/local/lib")
        _copy(path, root / str(where).lstrip("/") / path.name)
    for name in FILES:
        _copy(Path(name), root / name.lstrip("/"))
    for name, text in WRITTEN.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["/sbin/ldconfig", "-r", str(root)], check=True)


def _libraries(programs: list[Path], environment: Path) -> set[Path]:
    """Shared libraries that programs and modules load, but for the environment's own."""
    found = set[Path]()
    for program in programs:
        listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True).stdout
        found |= {Path(name) for name in _LIBRARY.findall(listed)}
    return {path for path in found if not path.is_relative_to(environment)}


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
