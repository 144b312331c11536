"""`pagewire up --demo`: the pipe through which the gateway's page asks to kill the worker."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

from pagewire._channel import is_local
from pagewire.cli.launcher.services import Settings
from pagewire.cli.options import CommandError

KILL_WORKER = b"w"


class DemoPipe:
    """This command's end of the pipe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.unlink(missing_ok=True)  # of an earlier run in the same folder
        os.mkfifo(path, 0o600)
        # For writing, too: the end of one gateway is then no end of file here.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def asks_for_kill(self) -> bool:
        """True if the page has asked since the last call; more than once counts as once."""
        try:
            return KILL_WORKER in os.read(self._fd, 4096)
        except BlockingIOError:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        self.path.unlink(missing_ok=True)


@contextmanager
def demo_pipe(wanted: bool, folder: Path) -> Iterator[DemoPipe | None]:
    """The pipe in `folder` while the block runs; None without --demo."""
    if not wanted:
        yield None
        return
    with DemoPipe(folder / "demo.pipe") as pipe:
        yield pipe


def check_demo(wanted: bool, settings: Settings) -> None:
    """Raises CommandError where others than users of this machine could kill the worker."""
    if wanted and not is_local(settings.host):
        raise CommandError(f"--demo: on --host {settings.host} others could kill the worker")


def with_demo(settings: Settings, pipe: DemoPipe | None) -> Settings:
    """The settings with the gateway's option for the pipe."""
    if pipe is None:
        return settings
    own = ("--demo", str(pipe.path))
    return replace(settings, gateway_options=(*own, *settings.gateway_options))
