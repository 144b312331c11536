"""The model that `pagewire up` serves: its folder on this machine, and the name for requests."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagewire.cli.checkout import environment
from pagewire.cli.options import CommandError
from pagewire.hub import names
from pagewire.hub.names import ModelName
from pagewire.settings.model_folder import problem_with

PACKAGES = Path(__file__).resolve().parents[3]  # the folder that holds `pagewire`


@dataclass(frozen=True, slots=True)
class ServedFolder:
    """A model's folder, absolute, and what requests call it."""

    folder: Path
    name: str
    label: str  # as the user spelled it


def find_model(given: Path | None, checkout: Path) -> ServedFolder:
    """The folder of --model, downloaded or made now if need be. Raises CommandError."""
    if given is None:
        return _local(_default_model(checkout))
    if (name := names.name_in(given)) is not None:
        return ServedFolder(_downloaded(name), name.repository, str(name))
    if problem := problem_with(given):
        raise CommandError(f"--model: {problem}")
    return _local(given.resolve())  # absolute, since the services run in another folder


def _local(folder: Path) -> ServedFolder:
    return ServedFolder(folder, folder.name, folder.name)


def _downloaded(name: ModelName) -> Path:
    """The folder of a hub's model, with its progress on stderr."""
    # In a process of its own, since a download can only be stopped together with its process.
    command = [sys.executable, "-m", "pagewire.hub", str(name)]
    status, printed = _run(command, env=environment(PACKAGES))
    if status:
        raise CommandError(f"--model: {printed or f'the download of {name} failed'}")
    return Path(printed)


def _default_model(checkout: Path) -> Path:
    """Creates the embedded model's folder, with its progress on stderr."""
    command = [sys.executable, "-m", "default_model"]
    status, printed = _run(command, cwd=checkout, env=environment(checkout))
    if status:
        raise CommandError(
            f"the embedded model could not be made (status {status}); "
            "give a model folder with --model"
        )
    return Path(printed)


def _run(command: list[str], *, env: Mapping[str, str], cwd: Path | None = None) -> tuple[int, str]:
    """Status and stripped output of a command that a stop signal ends."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=cwd, env=env) as running:
        try:
            printed, _ = running.communicate()
        except BaseException:
            running.terminate()  # the next run starts anew
            raise
    return running.returncode, printed.strip()
