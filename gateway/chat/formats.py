"""The formats of tool calls and reasoning, by name: each is a file of `families`.

A plug-in adds one by an entry point of its package, whose object is a ToolCallFormat or a
ReasoningFormat. It is loaded once an option names it, and no chat template is asked about it.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from gateway.chat.families import gemma4, harmony, mistral, seed_oss
from gateway.chat.families.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from gateway.chat.families.dsml import DEEPSEEK_V4, DEEPSEEK_V32
from gateway.chat.families.gemma4 import GEMMA4
from gateway.chat.families.glm import GLM
from gateway.chat.families.harmony import HARMONY
from gateway.chat.families.hermes import HERMES
from gateway.chat.families.kimi import KIMI
from gateway.chat.families.lfm2 import LFM2
from gateway.chat.families.llama3 import LLAMA3_JSON
from gateway.chat.families.minimax_m2 import MINIMAX_M2
from gateway.chat.families.mistral import MISTRAL
from gateway.chat.families.qwen3_coder import QWEN3_CODER
from gateway.chat.families.seed_oss import SEED_OSS
from gateway.chat.families.think_tags import DEEPSEEK_R1, QWEN3
from gateway.chat.reasoning_format import ReasoningFormat
from gateway.chat.tool_format import ToolCallFormat

# The first whose format a chat template holds is the model's.
ALL_FORMATS = (
    *(HARMONY, KIMI, DEEPSEEK_V32, DEEPSEEK_V4, DEEPSEEK_V3, DEEPSEEK_V31, MINIMAX_M2, SEED_OSS),
    *(GEMMA4, LFM2, GLM, QWEN3_CODER, HERMES, MISTRAL, LLAMA3_JSON),
)
ALL_REASONING = (
    *(harmony.REASONING, gemma4.REASONING, mistral.REASONING, seed_oss.REASONING),
    *(QWEN3, DEEPSEEK_R1),
)
FORMATS: Mapping[str, ToolCallFormat] = {one.name: one for one in ALL_FORMATS}
REASONING: Mapping[str, ReasoningFormat] = {one.name: one for one in ALL_REASONING}

TOOL_PLUGINS, REASONING_PLUGINS = "pagewire.tool_parsers", "pagewire.reasoning_parsers"

Format = TypeVar("Format", ToolCallFormat, ReasoningFormat)


class BadPlugin(ValueError):
    """Raised for a plug-in that cannot be loaded, or holds no format."""


def tool_format(name: str) -> ToolCallFormat:
    """The format of tool calls of a name. Raises BadPlugin, or LookupError for an unknown name."""
    return _named(name, FORMATS, TOOL_PLUGINS, ToolCallFormat)


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of reasoning of a name. Raises BadPlugin, or LookupError for an unknown name."""
    return _named(name, REASONING, REASONING_PLUGINS, ReasoningFormat)


def tool_parsers() -> tuple[str, ...]:
    """The names of all formats of tool calls, those of plug-ins last. Nothing is loaded."""
    return (*FORMATS, *sorted(_plugins(TOOL_PLUGINS).keys() - FORMATS.keys()))


def reasoning_parsers() -> tuple[str, ...]:
    """The names of all formats of reasoning, those of plug-ins last. Nothing is loaded."""
    return (*REASONING, *sorted(_plugins(REASONING_PLUGINS).keys() - REASONING.keys()))


def detect(template: str) -> ToolCallFormat | None:
    """The format of tool calls in a chat template; None when it has none of these."""
    return _first(ALL_FORMATS, lambda one: one.is_in is not None and one.is_in(template))


def detect_reasoning(template: str) -> ReasoningFormat | None:
    """The format of reasoning in a chat template; None when it has none of these."""
    return _first(ALL_REASONING, lambda one: one.is_in is not None and one.is_in(template))


def _first(known: tuple[Format, ...], is_it: Callable[[Format], bool]) -> Format | None:
    return next(filter(is_it, known), None)


def _plugins(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def _named(name: str, known: Mapping[str, Format], group: str, kind: type[Format]) -> Format:
    if name in known:
        return known[name]
    point = _plugins(group)[name]
    what = f"the plug-in {point.value} of {group}"
    try:
        found = point.load()
    except Exception as error:  # a plug-in's own code
        raise BadPlugin(f"{what} cannot be loaded: {error}") from error
    if not isinstance(found, kind):
        raise BadPlugin(f"{what} is a {type(found).__name__}, not a {kind.__name__}")
    return found
