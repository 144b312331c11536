"""The process that reads pictures: it forks a child for each, which may die of it."""

import contextlib
import json
import os
import socket
import sys
from functools import partial
from typing import Any

from PIL import Image

from gateway.tokens.pictures.answers import UnreadPicture, pack_answer
from gateway.tokens.pictures.processing import process
from gateway.tokens.pictures.settings import EncoderForm, PictureSettings
from wire.forks import frames
from wire.forks.helper import Helper
from wire.forks.limits import QUICK_NICENESS, CheckLimits, give_way


def _answer(settings: PictureSettings, max_pixels: int, content: bytes) -> bytes:
    try:
        return pack_answer(process(content, settings, max_pixels))
    except UnreadPicture as error:
        return frames.BAD + str(error).encode()


def _settings(given: dict[str, Any]) -> PictureSettings:
    colours = {name: tuple(given[name]) for name in ("means", "deviations")}
    return PictureSettings(**given | colours | {"form": EncoderForm(given["form"])})


def main() -> None:
    control = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    give_way(QUICK_NICENESS)
    given = json.loads(frames.receive(control))
    Image.init()  # before any fork: children would read all formats' modules again
    frames.send(control, b"")
    # What a library writes about a child's end is of no use, and may quote the file.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    answer = partial(_answer, _settings(given["settings"]), given["max_pixels"])
    Helper(control, answer, CheckLimits(**given["limits"])).serve()


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # its parent is gone: nothing is left to do
        main()
