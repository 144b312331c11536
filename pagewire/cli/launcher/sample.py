"""The sample question of `pagewire up`: it may fail, and the services go on."""

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from pagewire._client import Client
from pagewire._errors import InvalidArgument, PagewireError
from pagewire._types import Delta
from pagewire.cli.launcher.identity import LocalIdentity
from pagewire.cli.launcher.journal import Journal
from pagewire.cli.launcher.processes import POLL_S
from pagewire.cli.launcher.supervisor import ServiceSupervisor
from pagewire.cli.options import CommandError

QUESTION = "What is the capital of Japan?"
MAX_SAMPLE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class SampleOutcome:
    """The outcome of the question."""

    problem: str = ""  # why there was no answer; empty when there was one
    can_chat: bool = True  # False: the model has no chat template


def ask(
    identity: LocalIdentity, timeout_s: float, journal: Journal, supervisor: ServiceSupervisor
) -> SampleOutcome:
    """Streams the sample answer while the services are watched.

    Raises CommandError when a service cannot be kept alive.
    """
    asked: Future[SampleOutcome] = Future()

    def work() -> None:
        try:
            asked.set_result(_outcome(identity, timeout_s, journal))
        except BaseException as error:
            asked.set_exception(error)

    threading.Thread(target=work, name="sample", daemon=True).start()
    while not asked.done():
        supervisor.tick()
        time.sleep(POLL_S)
    return asked.result()


def _outcome(identity: LocalIdentity, timeout_s: float, journal: Journal) -> SampleOutcome:
    target = f"{identity.settings.reachable_host}:{identity.settings.grpc_port}"
    can_chat = True
    try:
        with Client(
            target,
            api_key=identity.api_key,
            tls=identity.tls,
            timeout_s=timeout_s,
            allow_insecure_key=True,  # to this machine
        ) as client:
            can_chat = _can_chat(client)
            _stream(client, journal, can_chat)
    except (CommandError, PagewireError, OSError, ValueError) as error:
        return SampleOutcome(str(error), can_chat)
    return SampleOutcome(can_chat=can_chat)


def _can_chat(client: Client) -> bool:
    """True if the model has a chat template."""
    try:
        client.tokenize([{"role": "user", "content": QUESTION}])
    except InvalidArgument as error:
        return "no chat template" not in str(error)
    except PagewireError:
        return True  # the question will say what is wrong
    return True


def _stream(client: Client, journal: Journal, can_chat: bool) -> None:
    """Prints question and answer. Raises CommandError if the answer is empty."""
    if not can_chat:
        journal.say("the model has no chat template: the question is a plain prompt")
    journal.say(f"\n{journal.style.bold(QUESTION)}")
    shown = ""
    try:
        for delta in _deltas(client, can_chat):
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            shown += delta.text
    finally:
        journal.say("")
    if not shown.strip():
        raise CommandError("the model gave an empty answer")


def _deltas(client: Client, can_chat: bool) -> Iterator[Delta]:
    start = client.stream_chat if can_chat else client.stream
    with start(QUESTION, temperature=0, max_tokens=MAX_SAMPLE_TOKENS) as stream:
        yield from stream
