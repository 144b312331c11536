"""How the common model families write tool calls. Pure.

| name        | what the model writes                                                            |
| ----------- | -------------------------------------------------------------------------------- |
| hermes      | <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once per call           |
| llama3_json | {"name": ..., "parameters": {...}}; {...} as the whole answer or after a token    |
| mistral     | [TOOL_CALLS][{...}, {...}] or [TOOL_CALLS]name{...}, once per call                |
| qwen3_coder | as `families.tagged_calls` says                                                   |
| glm         | as `families.tagged_calls` says                                                   |
| kimi        | as `families.kimi` says                                                           |
| harmony     | as `families.harmony` says                                                        |
"""

import re
import secrets
import string
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.chat.calls import Calls, begins_call, read_arguments, read_call
from gateway.chat.families import harmony, kimi, tagged_calls
from gateway.chat.source import Source, Steps
from gateway.structure.calls import CallWriting
from gateway.structure.families.channels import ChannelCalls
from gateway.structure.families.json_calls import JsonCalls, SectionCalls
from gateway.structure.families.tagged_calls import TaggedCalls

Parse = Callable[[Source, Calls], Steps[None]]
IsCall = Callable[[Source, int, str, frozenset[str]], Steps[bool]]

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
LLAMA3_TAG = "<|python_tag|>"
MISTRAL_MARKER = "[TOOL_CALLS]"
GLM_TOKENS = (
    *(HERMES_OPEN, HERMES_CLOSE),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
MAX_HEAD_CHARACTERS = 256  # between Mistral's marker and the arguments
_MISTRAL_HEAD = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")
_JSON_CALL = re.compile(r'"name\\?".*"arguments\\?"', re.DOTALL)
_ALPHANUMERIC = string.ascii_letters + string.digits


def long_id() -> str:
    """An id in OpenAI's form."""
    return f"call_{uuid.uuid4().hex[:24]}"


def short_id() -> str:
    """Nine letters and digits: Mistral's templates accept no other ids."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """The format of one model family."""

    name: str
    parse: Parse
    shown_tokens: tuple[str, ...] = ()  # special tokens that the parser must see
    new_id: Callable[[], str] = long_id
    writing: CallWriting | None = None  # None: of forced calls, which are plain JSON
    openings: tuple[str, ...] = ()  # by which calls may begin within reasoning
    # Whether a call of one of some functions begins with an opening at an offset.
    is_call: IsCall | None = None


def parse_hermes(source: Source, calls: Calls) -> Steps[None]:
    """Parses calls between tags, anywhere in the text; a tag may hold several, or a list.

    A closing tag that closes nothing is dropped once the answer has a call.
    """
    while True:
        closing = (HERMES_CLOSE,) if calls.has_any else ()
        found = yield from source.pass_until_any((HERMES_OPEN, *closing), calls.say)
        if found is None:
            break
        marker, word = found
        behind = marker + len(word)
        if word == HERMES_CLOSE:
            source.take(behind)
            continue
        start = yield from source.skip_space(behind)
        if not (yield from _read_tagged(source, start, calls)):
            calls.say(source.take(behind))
    calls.say(source.take(len(source.text)))


def _read_tagged(source: Source, at: int, calls: Calls) -> Steps[bool]:
    """Parses the calls after an opening tag, and the closing tag; False if there are none."""
    if (yield from source.starts_with("[", at)):
        if not (yield from read_list(source, at, calls)):
            return False
    elif not (yield from read_call(source, at, calls)):
        return False
    while True:
        next_at = yield from source.skip_space(0)
        if (yield from source.starts_with(HERMES_CLOSE, next_at)):
            source.take(next_at + len(HERMES_CLOSE))
            return True
        if (yield from source.starts_with(",", next_at)):
            next_at = yield from source.skip_space(next_at + 1)
        if not (yield from read_call(source, next_at, calls)):
            return True


def _is_json_call(source: Source, at: int, opening: str, names: frozenset[str]) -> Steps[bool]:
    """True if a call, or a list with one, follows an opening."""
    start = yield from source.skip_space(at + len(opening))
    if (yield from source.starts_with("[", start)):
        start = yield from source.skip_space(start + 1)
    return (yield from begins_call(source, start, names))


def parse_llama3(source: Source, calls: Calls) -> Steps[None]:
    """Parses calls that are the whole answer, or follow the tag."""
    start = yield from source.skip_space(0)
    yield from _read_row(source, start, calls)
    while (marker := (yield from source.pass_until(LLAMA3_TAG, calls.say))) is not None:
        behind = marker + len(LLAMA3_TAG)
        start = yield from source.skip_space(behind)
        if not (yield from _read_row(source, start, calls)):
            calls.say(source.take(behind))
    calls.say(source.take(len(source.text)))


def _read_row(source: Source, at: int, calls: Calls) -> Steps[bool]:
    """Parses calls separated by semicolons or space."""
    if not (yield from read_call(source, at, calls)):
        return False
    while True:
        at = yield from source.skip_space(0)
        if (yield from source.starts_with(";", at)):
            at = yield from source.skip_space(at + 1)
        if not (yield from read_call(source, at, calls)):
            return True


def parse_mistral(source: Source, calls: Calls) -> Steps[None]:
    """Parses a list of calls, or one call, after each marker."""
    while (marker := (yield from source.pass_until(MISTRAL_MARKER, calls.say))) is not None:
        behind = marker + len(MISTRAL_MARKER)
        start = yield from source.skip_space(behind)
        is_list = yield from source.starts_with("[", start)
        read = read_list if is_list else _read_named
        if not (yield from read(source, start, calls)):
            calls.say(source.take(behind))
    calls.say(source.take(len(source.text)))


def read_list(source: Source, at: int, calls: Calls) -> Steps[bool]:
    """Parses a JSON array of calls; False, with nothing taken, unless one begins at the offset."""
    if not (yield from source.starts_with("[", at)):
        return False
    at = yield from source.skip_space(at + 1)
    if not (yield from read_call(source, at, calls)):
        return False
    while True:
        at = yield from source.skip_space(0)
        if (yield from source.starts_with("]", at)):
            source.take(at + 1)
            return True
        if not (yield from source.starts_with(",", at)):
            return True
        at = yield from source.skip_space(at + 1)
        if not (yield from read_call(source, at, calls)):
            return True


def _read_named(source: Source, at: int, calls: Calls) -> Steps[bool]:
    """Parses name{...}, with or without [ARGS] between them."""
    head = yield from _named_head(source, at, calls.names)
    if head is None:
        return False
    calls.begin(head[1])
    source.take(head.end())
    yield from read_arguments(source, calls.add_arguments)
    return True


def _named_head(source: Source, at: int, names: frozenset[str]) -> Steps[re.Match[str] | None]:
    """The text before the arguments of such a call."""
    limit = at + MAX_HEAD_CHARACTERS
    while "{" not in source.text[at:limit]:
        if len(source.text) >= limit or not (yield from source.more()):
            return None
    head = _MISTRAL_HEAD.match(source.text, at)
    return head if head is not None and head[1] in names else None


def _is_mistral_call(source: Source, at: int, opening: str, names: frozenset[str]) -> Steps[bool]:
    start = yield from source.skip_space(at + len(opening))
    if (yield from source.starts_with("[", start)):
        return (yield from _is_json_call(source, at, opening, names))
    return (yield from _named_head(source, start, names)) is not None


HERMES = ToolCallFormat(
    "hermes",
    parse_hermes,
    shown_tokens=(HERMES_OPEN, HERMES_CLOSE),
    writing=JsonCalls(HERMES_OPEN, HERMES_CLOSE),
    openings=(HERMES_OPEN,),
    is_call=_is_json_call,
)
LLAMA3_JSON = ToolCallFormat(
    "llama3_json",
    parse_llama3,
    shown_tokens=(LLAMA3_TAG,),
    writing=JsonCalls(LLAMA3_TAG, arguments="parameters", begins_bare=True),
    openings=(LLAMA3_TAG,),
    is_call=_is_json_call,
)
MISTRAL = ToolCallFormat(
    "mistral",
    parse_mistral,
    shown_tokens=(MISTRAL_MARKER, "[ARGS]", "[CALL_ID]"),
    new_id=short_id,
    writing=JsonCalls(MISTRAL_MARKER, is_list=True),
    openings=(MISTRAL_MARKER,),
    is_call=_is_mistral_call,
)
QWEN3_CODER = ToolCallFormat(
    "qwen3_coder",
    tagged_calls.parse_qwen3_coder,
    shown_tokens=(HERMES_OPEN, HERMES_CLOSE),
    writing=TaggedCalls(
        HERMES_OPEN,
        HERMES_CLOSE,
        name_start=("<function=",),
        name_end=(">",),
        key_start=("<parameter=",),
        value_start=(">",),
        value_end="</parameter>",
        call_end=("</function>",),
        has_line_breaks=True,
    ),
    openings=(HERMES_OPEN, "<function="),
    is_call=tagged_calls.is_qwen3_coder_call,
)
GLM = ToolCallFormat(
    "glm",
    tagged_calls.parse_glm,
    shown_tokens=GLM_TOKENS,
    writing=TaggedCalls(
        HERMES_OPEN,
        HERMES_CLOSE,
        key_start=("<arg_key>",),
        value_start=("</arg_key>", "<arg_value>"),
        value_end="</arg_value>",
    ),
    openings=(HERMES_OPEN,),
    is_call=tagged_calls.is_glm_call,
)
KIMI = ToolCallFormat(
    "kimi",
    kimi.parse_kimi,
    shown_tokens=kimi.TOKENS,
    writing=SectionCalls(*kimi.TOKENS),
    openings=(kimi.SECTION_OPEN,),
    is_call=kimi.is_call,
)
HARMONY = ToolCallFormat(
    "harmony",
    harmony.parse_harmony,
    shown_tokens=harmony.TOKENS,
    writing=ChannelCalls(
        harmony.CHANNEL,
        harmony.MESSAGE,
        harmony.START,
        harmony.CONSTRAIN,
        harmony.END,
        other_ends=(harmony.CALL, harmony.RETURN),
    ),
)
ALL_FORMATS = (HERMES, LLAMA3_JSON, MISTRAL, QWEN3_CODER, GLM, KIMI, HARMONY)
FORMATS: Mapping[str, ToolCallFormat] = {
    tool_format.name: tool_format for tool_format in ALL_FORMATS
}


def detect(template: str) -> ToolCallFormat | None:
    """The format in a chat template; None when it has none of these."""
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return HARMONY
    if kimi.SECTION_OPEN in template:
        return KIMI
    if HERMES_OPEN in template and "<arg_key>" in template:
        return GLM
    if HERMES_OPEN in template and "<parameter=" in template:
        return QWEN3_CODER
    writes_json = _JSON_CALL.search(template) is not None
    if HERMES_OPEN in template and writes_json:  # others write XML between the same tags
        return HERMES
    if MISTRAL_MARKER in template:
        return MISTRAL
    if LLAMA3_TAG in template or ('"parameters": ' in template and "<|eot_id|>" in template):
        return LLAMA3_JSON
    return None
