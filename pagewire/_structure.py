"""Forms of structured output: the values of `structured_output`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewire._errors import InvalidArgument
from pagewire.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that matches a schema.

    >>> JsonSchema({"type": "integer", "maximum": 9}).schema["maximum"]
    9
    """

    schema: Mapping[str, Any] | bool | str  # the schema, or its JSON text
    whitespace_pattern: str | None = None  # regular expression between JSON's parts; "": none


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object."""

    whitespace_pattern: str | None = None


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that a regular expression matches as a whole."""

    pattern: str


@dataclass(frozen=True, slots=True, init=False)
class Choice:
    """One of the given texts.

    >>> Choice("yes", "no").options
    ('yes', 'no')
    """

    options: tuple[str, ...]

    def __init__(self, *options: str) -> None:
        object.__setattr__(self, "options", options)


@dataclass(frozen=True, slots=True)
class Grammar:
    """Text of a context-free grammar in the notation of Lark, or of GBNF."""

    text: str


StructuredOutput = JsonSchema | JsonObject | Regex | Choice | Grammar


def to_structured_output(structure: StructuredOutput) -> pb.StructuredOutput:
    """The structure as a message. Raises InvalidArgument."""
    try:
        match structure:
            case JsonSchema(schema, whitespace):
                text = schema if isinstance(schema, str) else json.dumps(schema)
                return pb.StructuredOutput(json_schema=text, whitespace_pattern=whitespace)
            case JsonObject(whitespace):
                empty = pb.JsonObject()
                return pb.StructuredOutput(json_object=empty, whitespace_pattern=whitespace)
            case Regex(pattern):
                return pb.StructuredOutput(regex=pattern)
            case Choice(options):
                return pb.StructuredOutput(choice=pb.Choice(options=options))
            case Grammar(text):
                return pb.StructuredOutput(grammar=text)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"structured_output: {error}") from None
    known = "JsonSchema, JsonObject, Regex, Choice or Grammar"
    raise InvalidArgument(f"structured_output: must be a {known}, not {type(structure).__name__}")
