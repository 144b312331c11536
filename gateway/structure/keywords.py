"""The keywords of JSON Schema, and what becomes of each. Pure."""

import json
import re

MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
SINGLE = frozenset({"items", "additionalProperties"})
VALUES = frozenset(
    {"type", "enum", "const", "$ref", "$id", "$anchor", "required"}
    | {"minItems", "maxItems", "minProperties", "maxProperties"}
    | {"minLength", "maxLength", "pattern", "format"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
# Annotations, which do not constrain the JSON.
NOTES = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated"}
    | {"readOnly", "writeOnly", "$comment", "$schema", "$vocabulary", "discriminator"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "xml", "externalDocs"}
    | {"strict", "order", "propertyOrdering", "enumNames", "enumDescriptions"}
    | {"markdownDescription", "errorMessage"}
)
# Not known to the grammar library: written in keywords that are (`rewriting`).
REWRITTEN_MAPS = frozenset({"dependentSchemas"})
REWRITTEN_SINGLE = frozenset(
    {"not", "if", "then", "else", "propertyNames", "unevaluatedProperties", "unevaluatedItems"}
    | {"additionalItems"}
)
REWRITTEN_VALUES = frozenset({"uniqueItems", "nullable", "dependentRequired", "dependencies"})

ALL_MAPS = MAPS | REWRITTEN_MAPS
ALL_SINGLE = SINGLE | REWRITTEN_SINGLE
KNOWN = ALL_MAPS | LISTS | ALL_SINGLE | VALUES | NOTES | REWRITTEN_VALUES

# Formats of strings that the grammar library holds; of the standard's others it does not.
HELD_FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
OTHER_FORMATS = frozenset(
    {"idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"}
    | {"json-pointer", "relative-json-pointer", "regex"}
)

_PLAIN_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$-]*")


def is_vendor(keyword: str) -> bool:
    """True if a keyword is a private annotation."""
    return keyword.startswith("x-") and keyword != "x-guidance"


def join(place: str, name: str) -> str:
    """The place of a member of an object."""
    if _PLAIN_NAME.fullmatch(name):
        return f"{place}.{name}"
    return f"{place}[{json.dumps(name[:64])}]"
