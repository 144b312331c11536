"""`pagewire.LLM`: a model in one program, without a server to start first."""

import math
from collections.abc import Iterable, Sequence
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Self, Unpack, cast

from pagewire._beams import BeamSearch
from pagewire._chat import Messages
from pagewire._client import Client
from pagewire._errors import FailedPrecondition, InvalidArgument
from pagewire._types import (
    BatchParams,
    CallOptions,
    ChatCallOptions,
    Completion,
    Embeddings,
    Pooling,
    Prompt,
    Usage,
)
from pagewire.cli.checkout import HERE
from pagewire.cli.launcher.models import find_model
from pagewire.cli.options import CommandError
from pagewire.hub import names
from pagewire.offline.engine import OwnEngine
from pagewire.offline.words import to_words

MAX_IN_FLIGHT = 256  # prompts that the scheduler has at a time, to choose a step's rows from
MAX_EMBEDDED = 512  # inputs of one call: their vectors fit a message, of any model's width


class LLM:
    """A model served for this program alone, by services that start and end with it.

    >>> llm = pagewire.LLM()  # doctest: +SKIP
    >>> for answer in llm.generate(["2 + 2 =", "3 + 3 ="], max_tokens=4):  # doctest: +SKIP
    ...     print(answer.text)

    `model` is a folder, a GGUF file or ORG/NAME of a hub; without it the embedded model. `options`
    are those of `pagewire up` and of the services, with _ for -: `dtype="bfloat16"`,
    `max_model_len=4096`, `enable_prefix_caching=False`. The services end at `close`, at the end of
    a `with` block, when nothing refers to the object, and when the process ends, in any way.
    Raises FailedPrecondition with the reason if they cannot start, TypeError for an unknown option.
    """

    def __init__(self, model: str | PathLike[str] | None = None, **options: object) -> None:
        words = to_words({**_of_model(model), **options})
        self._engine = OwnEngine(words)
        try:
            self._engine.wait_until_ready()
        except BaseException:
            self._engine.give_up()
            raise
        self.client = Client(self._engine.target, api_key=self._engine.api_key, timeout_s=math.inf)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BatchParams = None,
        *,
        progress: bool | None = None,
        **options: Unpack[CallOptions],
    ) -> list[Completion]:
        """Returns the completion of each prompt, in their order. Raises PagewireError.

        A prompt is a text or token ids; one alone is a list of one. `params` are those of all
        prompts, or a list with those of each. On a terminal, stderr shows a progress bar.
        """
        return self.client.batch(
            _prompts(prompts),
            params,
            max_concurrency=MAX_IN_FLIGHT,
            progress=progress,
            **options,
        )

    def chat(
        self,
        conversations: Messages | Iterable[Messages],
        params: BatchParams = None,
        *,
        progress: bool | None = None,
        **options: Unpack[ChatCallOptions],
    ) -> list[Completion]:
        """Returns the answer to each conversation; otherwise like `generate`.

        A conversation is a list of turns, or a string, which is one turn of the user.
        """
        return self.client.batch_chat(
            _conversations(conversations),
            params,
            max_concurrency=MAX_IN_FLIGHT,
            progress=progress,
            **options,
        )

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        beams: BeamSearch,
        params: BatchParams = None,
        *,
        progress: bool | None = None,
        **options: Unpack[CallOptions],
    ) -> list[Completion]:
        """Returns the likeliest completion of each prompt; `outputs` has all, best first.

        There are as many as beams, unless `n` asks for fewer.

        >>> best = llm.beam_search("Once", pagewire.BeamSearch(4), max_tokens=8)  # doctest: +SKIP
        """
        asked: CallOptions = {"n": beams.num_beams, **options, "beam_search": beams}
        return self.generate(prompts, params, progress=progress, **asked)

    def embed(
        self,
        inputs: Prompt | Iterable[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
    ) -> Embeddings:
        """Returns one vector per input, a text or token ids. Raises PagewireError."""
        listed = _prompts(inputs)
        parts = [
            self.client.embed(
                listed[first : first + MAX_EMBEDDED], pooling=pooling, normalize=normalize
            )
            for first in range(0, max(len(listed), 1), MAX_EMBEDDED)
        ]
        return Embeddings(
            tuple(vector for part in parts for vector in part.vectors),
            Usage(prompt_tokens=sum(part.usage.prompt_tokens for part in parts)),
            parts[0].request_id,
            parts[0].model,
        )

    def close(self) -> None:
        """Ends the services; further calls do nothing."""
        self.client.close()
        self._engine.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _of_model(model: str | PathLike[str] | None) -> dict[str, object]:
    """The options that name the model. One of a hub is downloaded here, where progress is seen."""
    if model is None:
        return {}
    if names.name_in(Path(model)) is None:
        return {"model": Path(model).absolute()}
    try:
        found = find_model(Path(model), HERE)
    except CommandError as error:
        raise FailedPrecondition(str(error), code="FAILED_PRECONDITION") from None
    return {"model": found.path, "served_model_name": found.name}


def _prompts(given: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """The list of prompts; of one, where that is given. Raises InvalidArgument."""
    listed = _listed("prompts", given)
    is_one = bool(listed) and isinstance(listed[0], Integral)
    return [cast(Sequence[int], listed)] if is_one else cast(list[Prompt], listed)


def _conversations(given: Messages | Iterable[Messages]) -> list[Messages]:
    """The list of conversations; of one, where that is given: its turns are no lists, no texts."""
    listed = _listed("conversations", given)
    is_one = bool(listed) and not isinstance(listed[0], (str, list, tuple))
    return [cast(Messages, listed)] if is_one else cast(list[Messages], listed)


def _listed(name: str, given: object) -> list[object]:
    if not isinstance(given, Iterable):
        raise InvalidArgument(f"{name}: needs a list of {name}, not {given!r}")
    return [given] if isinstance(given, str) else list(given)
