"""Fields for structured output: OpenAI's and vLLM's."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field

from gateway.errors.request_errors import invalid, unsupported
from gateway.http import fields
from gateway.http.messages import Strict
from gateway.structure import json_schema, tags
from gateway.structure.structure import (
    ANY_OBJECT,
    Compiled,
    ContextFree,
    JsonSchema,
    OneOfTexts,
    Regex,
)
from gateway.structure.tags import Asked, StructuralTags

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
TAG_FIELDS = ("structures", "triggers", "format")


class SchemaFormat(Strict):
    """A named schema. It is enforced whatever `strict` is."""

    name: str | None = None
    description: str | None = None
    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's response_format; with a json_object, llama.cpp's schema."""

    type: str
    json_schema: SchemaFormat | None = None
    schema_: Any = Field(None, alias="schema")
    structures: Any = None
    triggers: Any = None
    format: Any = None

    def to_structure(self) -> Asked | None:
        """None for plain text."""
        place = "response_format.json_schema"
        if self.type not in FORMATS:
            raise unsupported("response_format.type", "must be one of " + ", ".join(FORMATS))
        if self.json_schema is not None and self.type != "json_schema":
            raise invalid(place, 'belongs to type "json_schema" and to no other')
        if self.schema_ is not None and self.type != "json_object":
            raise invalid("response_format.schema", 'belongs to type "json_object"')
        described = {name: getattr(self, name) for name in TAG_FIELDS}
        if self.type == "structural_tag":
            return StructuralTags("response_format", described)
        for name, value in described.items():
            if value is not None:
                raise invalid(f"response_format.{name}", 'belongs to type "structural_tag"')
        if self.type == "json_object":
            if self.schema_ is not None:
                return JsonSchema("response_format.schema", self.schema_)
            return JsonSchema("response_format", ANY_OBJECT)
        if self.type == "text":
            return None
        if self.json_schema is None:
            raise invalid(place, 'is missing; type "json_schema" needs it')
        schema = self.json_schema.schema_
        return JsonSchema(f"{place}.schema", {} if schema is None else schema)


class StructuredOutputs(Strict):
    """vLLM's structured_outputs: one form, and JSON's whitespace."""

    neutral: ClassVar[fields.Neutral] = fields.STRUCTURED_OUTPUTS
    # There is one engine, without a fallback.
    harmless: ClassVar[Collection[str]] = frozenset({"disable_fallback", "backend"})

    json_: Any = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    llguidance: str | None = None  # as /v1/chat/completions/render writes it
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None

    def to_structure(self) -> Asked | None:
        """The form that is set. Raises RequestError unless it is exactly one."""
        prefix = "structured_outputs."
        forms = Forms(self.json_, self.regex, self.choice, self.grammar)
        structures = forms.to_structures(prefix)
        if self.json_object:
            place = f"{prefix}json_object"
            structures[place] = JsonSchema(place, ANY_OBJECT)
        if self.structural_tag is not None:
            place = f"{prefix}structural_tag"
            structures[place] = StructuralTags(place, tags.parse(self.structural_tag, place))
        if self.llguidance is not None:
            place = f"{prefix}llguidance"
            structures[place] = Compiled(place, self.llguidance)
        structure = the_one_of(structures)
        name, whitespace = f"{prefix}whitespace_pattern", self.whitespace_pattern
        if self.disable_any_whitespace:
            if whitespace is not None:
                raise invalid(name, "contradicts disable_any_whitespace")
            name, whitespace = f"{prefix}disable_any_whitespace", ""
        return with_whitespace(structure, name, whitespace)


@dataclass(frozen=True, slots=True)
class Forms:
    """The fields of vLLM's old and new form."""

    json: Any
    regex: str | None
    choice: list[str] | None
    grammar: str | None

    def to_structures(self, prefix: str) -> dict[str, Asked]:
        """The forms that are set, by field name."""
        found: dict[str, Asked] = {}
        if self.json is not None:
            place, schema = f"{prefix}json", self.json
            if isinstance(schema, str):
                schema = json_schema.parse(schema, place)
            found[place] = JsonSchema(place, schema)
        if self.regex is not None:
            found[f"{prefix}regex"] = Regex(f"{prefix}regex", self.regex)
        if self.choice is not None:
            found[f"{prefix}choice"] = OneOfTexts(f"{prefix}choice", tuple(self.choice))
        if self.grammar is not None:
            found[f"{prefix}grammar"] = ContextFree(f"{prefix}grammar", self.grammar)
        return found


def the_one_of(structures: Mapping[str, Asked]) -> Asked | None:
    """The structure, if one is set. Raises RequestError for several."""
    if len(structures) > 1:
        first, second, *_ = structures
        raise invalid(second, f"contradicts {first}; send one of them")
    return next(iter(structures.values()), None)


def with_whitespace(structure: Asked | None, name: str, whitespace: str | None) -> Asked | None:
    """The structure with the whitespace setting of the field `name`."""
    if whitespace is None:
        return structure
    if not isinstance(structure, JsonSchema):
        raise invalid(name, "is only allowed with JSON")
    return replace(structure, whitespace=whitespace)
