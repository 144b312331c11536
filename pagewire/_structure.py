"""Forms of structured output: the values of `structured_output`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

from pagewire._errors import InvalidArgument, InvalidOutput
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


class ModelClass(Protocol):
    """A class that has a JSON schema and reads JSON, as pydantic's models."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        """The schema of the class."""

    @classmethod
    def model_validate_json(cls, json_data: str) -> Self:
        """The object that a JSON text describes. Raises ValueError."""


StructuredOutput = JsonSchema | JsonObject | Regex | Choice | Grammar | type[ModelClass]


def model_class(structure: object) -> type[ModelClass] | None:
    """The class to read an output with; None if the structure is no class with a schema."""
    methods = ("model_json_schema", "model_validate_json")
    if isinstance(structure, type) and all(hasattr(structure, name) for name in methods):
        return cast(type[ModelClass], structure)
    return None


def parsed(text: str, model: type[ModelClass]) -> ModelClass:
    """The object that a whole output describes. Raises InvalidOutput."""
    try:
        return model.model_validate_json(text)
    except ValueError as error:  # pydantic's ValidationError is one
        raise InvalidOutput(f"the output is no {model.__name__}: {error}", text=text) from error


def to_structured_output(structure: StructuredOutput) -> pb.StructuredOutput:
    """The structure as a message. Raises InvalidArgument."""
    if (model := model_class(structure)) is not None:
        structure = JsonSchema(model.model_json_schema())
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
    known = "JsonSchema, JsonObject, Regex, Choice, Grammar or a pydantic class"
    raise InvalidArgument(f"structured_output: must be a {known}, not {type(structure).__name__}")
