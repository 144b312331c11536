"""Fields of the OpenAI API that this gateway does not implement, and how each is handled.

No field that would change an answer is ignored. A field is either harmless (without effect on the
model) or unsupported: then only values that mean "off" are accepted, and every other value is
refused with the field's name. Fields in neither table nor schema are refused as unknown.
"""

from collections.abc import Container, Mapping
from typing import Any

from gateway.errors import unsupported

# For the caller's bookkeeping; accepted with any value and ignored.
HARMLESS = frozenset(
    {"metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)

# Field -> values that change nothing. Null is accepted everywhere.
_BOTH: dict[str, tuple[Any, ...]] = {
    "guided_decoding_backend": (),
}

CHAT: dict[str, tuple[Any, ...]] = _BOTH | {
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "chat_template": (),
}

COMPLETION: dict[str, tuple[Any, ...]] = _BOTH | {
    "best_of": (1,),
    "suffix": ("",),
}

EMBEDDING: dict[str, tuple[Any, ...]] = {
    "dimensions": (),
    "truncate_prompt_tokens": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}

STRUCTURED_OUTPUTS: dict[str, tuple[Any, ...]] = {
    "disable_fallback": (True, False),  # there is one engine, without a fallback
    "disable_additional_properties": (False,),
    "structural_tag": (),
}

RESPONSE: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}

MESSAGE: dict[str, tuple[Any, ...]] = {
    "refusal": (),
    "function_call": (),
    "audio": (),
    "annotations": ([],),
}


def strip(
    body: Any,
    neutral: Mapping[str, tuple[Any, ...]],
    path: str = "",
    known: Container[str] = (),
) -> Any:
    """The body without neutral fields, and without harmless ones that are not known.

    Raises RequestError for the first neutral field that is not "off". Anything but a JSON object is
    returned unchanged: the schema refuses it.
    """
    if not isinstance(body, dict):
        return body
    kept = {}
    for name, value in body.items():
        if name in neutral:
            if value is not None and not any(_is_same(value, off) for off in neutral[name]):
                raise unsupported(path + name, _problem(neutral[name]))
        elif path or name in known or name not in HARMLESS:
            kept[name] = value
    return kept


def _is_same(value: Any, neutral: Any) -> bool:
    # JSON's true is not 1, unlike Python's.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _problem(neutral: tuple[Any, ...]) -> str:
    if not neutral:
        return "is not supported by this server; leave it out"
    return f"is not supported by this server; leave it out or send {neutral[0]!r}"
