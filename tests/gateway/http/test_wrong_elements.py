"""A list or an object of a body costs little, whatever is in it and wherever it stands.

Nothing here names a field: every list and object of the OpenAPI document is filled, at any depth
and in every branch of a union, and the work is counted in errors and calls, not in seconds.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import gateway.http.app  # noqa: F401 - all bodies
from gateway.errors.request_errors import RequestError
from gateway.http.messages import Strict

DOCUMENT = json.loads((Path(__file__).parents[3] / "docs" / "openapi.json").read_text())
SCHEMAS = DOCUMENT["components"]["schemas"]
NUM_ELEMENTS = 70_000  # more than any list may have but those of ids
MOST_ERRORS = 200  # of all branches and fields on the way to one element
MOST_CALLS = 5_000
WRONG: tuple[Any, ...] = (1, None, "x", [], {}, {"type": 1})
LISTS = [[wrong] * NUM_ELEMENTS for wrong in WRONG]
OBJECTS = [{f"x{index}": wrong for index in range(NUM_ELEMENTS)} for wrong in (1, [])]
DEEPEST = 7
Schema = dict[str, Any]


def resolved(schema: Schema) -> Schema:
    reference = schema.get("$ref")
    return schema if reference is None else SCHEMAS[reference.rpartition("/")[2]]


def least(schema: Schema) -> Any:
    """A value that the schema allows, with as little as possible in it."""
    schema = resolved(schema)
    for one_of in ("anyOf", "oneOf"):
        if one_of in schema:
            return least(schema[one_of][0])
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object":
            fields, needed = schema.get("properties", {}), schema.get("required", [])
            told = {name: least(fields[name]) for name in needed}
            return told | ({"type": least(fields["type"])} if "type" in fields else {})
        case "array":
            return [least(schema["items"])]
        case kind:
            return {"string": "x", "integer": 1, "number": 1, "boolean": True}.get(kind)


def filled(schema: Schema, depth: int = 0) -> Iterator[Any]:
    """Values that hold one long list or object each, once for every place that there is."""
    schema = resolved(schema)
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches:
        for branch in branches:
            yield from filled(branch, depth)
        return
    yield from LISTS
    yield from OBJECTS
    if depth == DEEPEST:
        return
    if schema.get("type") == "array":
        yield from ([inner] for inner in filled(schema["items"], depth + 1))
    elif "properties" in schema:
        whole = least(schema)
        yield whole | OBJECTS[0]
        for name, field in schema["properties"].items():
            yield from (whole | {name: inner} for inner in filled(field, depth + 1))


def bodies() -> Iterator[type[Strict]]:
    """The bodies of all routes of the document."""
    found = {kind.__name__: kind for kind in subclasses(Strict)}
    for methods in DOCUMENT["paths"].values():
        for operation in methods.values():
            content = operation.get("requestBody", {}).get("content", {})
            if content:
                yield found[content["application/json"]["schema"]["$ref"].rpartition("/")[2]]


def subclasses(kind: type[Strict]) -> Iterator[type[Strict]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from subclasses(sub)


def work_of(kind: type[Strict], body: Any) -> tuple[int, int]:
    """The errors that a body makes, and the calls of Python that it takes to find them."""
    num_calls = num_errors = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        kind.model_validate(body)
    except ValidationError as error:
        sys.setprofile(None)
        num_errors = error.error_count()
    except RequestError:
        num_errors = 1
    finally:
        sys.setprofile(None)
    return num_errors, num_calls


@pytest.mark.parametrize(
    "kind", sorted(set(bodies()), key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__
)
def test_wrong_elements_make_few_errors_wherever_they_stand(kind: type[Strict]) -> None:
    num_places = 0
    for body in filled(SCHEMAS[kind.__name__]):
        num_places += 1
        num_errors, num_calls = work_of(kind, body)
        assert num_errors <= MOST_ERRORS and num_calls <= MOST_CALLS, str(body)[:500]
    assert num_places > len(LISTS)
