"""The checking process: reads the vocabulary once, then forks a child for each grammar."""

import contextlib
import json
import os
import socket
import sys
from functools import partial

from wire.forks import frames
from wire.forks.helper import Helper
from wire.forks.limits import QUICK_NICENESS, CheckLimits, give_way
from wire.grammar import (
    BadGrammar,
    BadVocabulary,
    GrammarTooLarge,
    Vocabulary,
    check,
    read_vocabulary,
)


def _answer(vocabulary: Vocabulary, grammar: bytes) -> bytes:
    try:
        check(vocabulary, grammar.decode())
    except BadGrammar as error:
        is_large = isinstance(error, GrammarTooLarge)
        return (frames.TOO_LARGE if is_large else frames.BAD) + str(error).encode()
    return frames.FOLLOWED


def main() -> None:
    # A fork for a check must find one thread: the Rust library starts none before it is used.
    control = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    give_way(QUICK_NICENESS)
    settings = json.loads(frames.receive(control))
    try:
        vocabulary = read_vocabulary(
            settings["definition"], settings["vocab_size"], settings["eos_token_ids"]
        )
    except BadVocabulary as error:
        frames.send(control, str(error).encode())
        return
    frames.send(control, b"")
    # What Rust writes about a child's end is of no use, and may quote the grammar.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    Helper(control, partial(_answer, vocabulary), CheckLimits(**settings["limits"])).serve()


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # its parent is gone: nothing is left to do
        main()
