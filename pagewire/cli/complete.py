"""`pagewire complete`: streams the completion of one prompt to stdout."""

import argparse
import sys
from typing import TYPE_CHECKING

from pagewire._errors import PagewireError
from pagewire.cli.interrupts import interrupts_close
from pagewire.cli.options import (
    add_command,
    add_connection,
    add_sampling,
    to_client,
    to_sampling,
)

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers


def add_parser(commands: "Subparsers") -> None:
    """Adds the command."""
    parser = add_command(commands, "complete", "Complete a text, streamed to stdout.")
    parser.add_argument("prompt", help="text to complete; - reads it from stdin")
    parser.add_argument("--model", default="", help="model to use, where several are served")
    add_sampling(parser)
    add_connection(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Streams until the output ends."""
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    with (
        to_client(options) as client,
        interrupts_close() as interrupts,
        client.stream(prompt, to_sampling(options), model=options.model) as stream,
    ):
        interrupts.close(stream)
        try:
            for delta in stream:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        except PagewireError:
            if not interrupts.have_come:
                raise
    if interrupts.have_come:
        raise KeyboardInterrupt
    sys.stdout.write("\n")
    return 0
