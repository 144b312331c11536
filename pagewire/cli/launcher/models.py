"""The model that `pagewire up` serves: where it is on this machine, and the name for requests."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagewire.cli.checkout import environment
from pagewire.cli.options import CommandError
from pagewire.gguf.files import is_gguf, model_name, read_file
from pagewire.gguf.header import BadGguf
from pagewire.hub import names
from pagewire.hub.names import ModelName
from pagewire.settings.model_folder import problem_with

PACKAGES = Path(__file__).resolve().parents[3]  # the folder that holds `pagewire`


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's folder or GGUF file, absolute, and what requests call it."""

    path: Path
    name: str
    label: str  # as the user spelled it


def find_model(given: Path | None, checkout: Path) -> FoundModel:
    """The model of --model, downloaded or made now if need be. Raises CommandError."""
    if given is None:
        return _local(_default_model(checkout))
    if (name := names.name_in(given)) is not None:
        return FoundModel(_downloaded(name), name.repository, str(name))
    if problem := problem_with(given):
        raise CommandError(f"--model: {problem}")
    if is_gguf(given):
        _check(given)
        return _local(given.absolute())  # a link's name says what it leads to
    return _local(given.resolve())  # absolute, since the services run in another folder


def _local(path: Path) -> FoundModel:
    name = model_name(path)
    return FoundModel(path, name, name)


def _check(file: Path) -> None:
    """Raises CommandError for a GGUF file that the services would refuse."""
    try:
        for name in ("config.json", "tokenizer.json"):
            read_file(file, name)
    except (BadGguf, OSError) as error:
        raise CommandError(f"--model: {error}") from error


def _downloaded(name: ModelName) -> Path:
    """The folder of a hub's model, with its progress on stderr."""
    # In a process of its own, since a download can only be stopped together with its process.
    command = [sys.executable, "-m", "pagewire.hub", str(name)]
    status, printed = _run(command, env=environment(PACKAGES))
    if status:
        raise CommandError(f"--model: {printed or f'the download of {name} failed'}")
    return Path(printed)


def _default_model(checkout: Path) -> Path:
    """The embedded model's file, downloaded if it is not installed; its progress on stderr."""
    command = [sys.executable, "-m", "default_model", "--file"]
    status, printed = _run(command, cwd=checkout, env=environment(checkout))
    if status:
        raise CommandError(
            f"the embedded model could not be found (status {status}); give a model with --model"
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
