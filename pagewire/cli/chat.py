"""`pagewire chat`: a conversation in the terminal. Ctrl-C stops an answer, not the conversation."""

import argparse
import select
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from pagewire._chat import Message
from pagewire._client import Client
from pagewire._errors import PagewireError
from pagewire._terminal import Style, is_terminal
from pagewire._types import Delta, SamplingParams
from pagewire.cli.interrupts import interrupts_close
from pagewire.cli.options import (
    add_command,
    add_connection,
    add_sampling,
    to_client,
    to_sampling,
)

with suppress(ImportError):  # not on every platform
    import readline  # gives input() history and editing

    # Python turns it off; with it, a terminal says where a paste begins and ends.
    readline.parse_and_bind("set enable-bracketed-paste on")

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers

PASTE_S = 0.05  # between the lines of a paste, at most

HELP = """\
/clear         forget the conversation, keep the system message
/system TEXT   set the system message and start over; without TEXT, remove it
/help          this list
/quit          leave (also Ctrl-D)
Ctrl-C stops the current answer."""


def add_parser(commands: "Subparsers") -> None:
    """Adds the command."""
    parser = add_command(commands, "chat", "Chat with the model in the terminal.")
    parser.add_argument("--system", default="", metavar="TEXT", help="first system message")
    parser.add_argument("--model", default="", help="model to use, where several are served")
    add_sampling(parser)
    add_connection(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Reads lines and answers them until the end of input."""
    with to_client(options) as client:
        models = client.wait_until_ready(timeout_s=min(10.0, options.timeout_s))
        name = options.model or models[0].name
        chat = Chat(client, name, to_sampling(options), sys.stdout)
        chat.set_system(options.system)
        if is_terminal(sys.stdin):
            chat.note(f"{name}. /help lists the commands.")
        while _next_turn(chat):
            pass
    return 0


def _next_turn(chat: "Chat") -> bool:
    """Reads a line and takes it; False at the end of input and when the user quits."""
    try:
        return chat.take(_pasted(input("> ")) if is_terminal(sys.stdin) else input())
    except EOFError:
        chat.note("")
        return False
    except KeyboardInterrupt:
        chat.note("\n/quit or Ctrl-D leaves.")
        return True


def _pasted(first: str) -> str:
    """A line, with those that have come by the time it is read: more than a hand types."""
    lines = [first]
    # A terminal that does not mark a paste sends its lines at once.
    while first.strip() and not first.startswith("/") and _has_input(PASTE_S):
        try:
            lines.append(input(". "))
        except EOFError:
            break
    return "\n".join(lines)


def _has_input(timeout_s: float) -> bool:
    return bool(select.select([sys.stdin], [], [], timeout_s)[0])


class Chat:
    """The conversation so far, and the commands on it."""

    def __init__(self, client: Client, model: str, params: SamplingParams, out: TextIO) -> None:
        self.history: list[Message] = []
        self._client = client
        self._model = model
        self._params = params
        self._out = out
        self._style = Style(out)

    def take(self, line: str) -> bool:
        """Runs a command or answers a message; False when the user quits."""
        command, _, argument = line.strip().partition(" ")
        match command:
            case "":
                pass
            case "/quit" | "/exit":
                return False
            case "/help":
                self.note(HELP)
            case "/clear":
                self.history = [turn for turn in self.history if turn.role == "system"]
                self.note("Cleared.")
            case "/system":
                self.set_system(argument.strip())
                self.note("System message set." if argument.strip() else "System message removed.")
            case _ if command.startswith("/"):
                self.note(f"{command}: no such command. /help lists them.")
            case _:
                self._answer(line)
        return True

    def set_system(self, text: str) -> None:
        """Starts a new conversation with this system message, or without one if it is empty."""
        self.history = [Message("system", text)] if text else []

    def note(self, text: str) -> None:
        """Prints text that is not the model's."""
        self._out.write(self._style.dim(text) + "\n")
        self._out.flush()

    def _answer(self, line: str) -> None:
        turns = [*self.history, Message("user", line)]
        clock, is_thinking = AnswerClock(), False
        with (
            interrupts_close() as interrupts,
            self._client.stream_chat(turns, self._params, model=self._model) as stream,
        ):
            interrupts.close(stream)
            try:
                for delta in stream:
                    clock.count(len(delta.token_ids))
                    is_thinking = self._show(delta, is_thinking)
            except PagewireError as error:
                if not interrupts.have_come:
                    self._out.write("\n")
                    self.note(f"error: {error}")
                    return  # the question is dropped, so that it can be asked again
        outcome = f"stopped; {clock.summary()}" if interrupts.have_come else clock.summary()
        self.history = [*turns, Message("assistant", stream.text)]
        self._out.write("\n")
        self.note(outcome)

    def _show(self, delta: Delta, is_thinking: bool) -> bool:
        """Prints a piece, with reasoning dimmed; returns whether it was reasoning."""
        if delta.reasoning:
            self._out.write(self._style.dim(delta.reasoning))
            is_thinking = True
        if delta.text and is_thinking:
            self._out.write("\n")
            is_thinking = False
        self._out.write(delta.text)
        self._out.flush()
        return is_thinking


class AnswerClock:
    """Measures the time to first token and the token rate of one answer."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._first_s = self._last_s = self._start_s
        self._num_first = self._num_tokens = 0

    def count(self, num_tokens: int) -> None:
        """Counts tokens that have just arrived."""
        self._last_s = time.monotonic()
        if num_tokens and not self._num_tokens:
            self._first_s, self._num_first = self._last_s, num_tokens
        self._num_tokens += num_tokens

    def summary(self) -> str:
        """The measurements as text; the rate excludes the first arrival."""
        ttft_ms = (self._first_s - self._start_s) * 1000
        elapsed_s = self._last_s - self._first_s
        rate = (self._num_tokens - self._num_first) / elapsed_s if elapsed_s > 0 else 0.0
        return f"{self._num_tokens} tokens, first after {ttft_ms:.0f} ms, {rate:.1f} tokens/s"
