"""The exact grammar of a schema, or the place of the number that has none."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.errors.request_errors import RequestError, invalid, unsupported
from gateway.structure import json_schema, keywords
from gateway.structure.exact.documents import SchemaDocument
from gateway.structure.exact.failures import NotWritten
from gateway.structure.exact.numbers import Rounded, fraction, is_number, rounded_keywords
from gateway.structure.exact.writer import grammar_of


def exact_grammar(
    schema: Any, asked: Any, place: str, options: Mapping[str, Any], blanks: str
) -> str:
    """The grammar of a schema, and of no value that differs by a rounded digit.

    `asked` is the same schema as the client sent it. Raises RequestError naming the number's place.
    """
    try:
        written = grammar_of(schema, options, blanks)
    except NotWritten as error:
        raise _refusal(asked, place, error) from error
    if written is None:
        raise invalid(place, "allows nothing")
    return json.dumps({"grammars": [{"lark_grammar": written}]}, ensure_ascii=False)


def rounds(schema: Any) -> bool:
    """True if the grammar library would change a number of a schema."""
    return SchemaDocument(schema).is_rounded()


def without_rounded(schema: Any) -> Any:
    """A schema that only describes, without the rules whose numbers would be changed."""
    if not isinstance(schema, dict):
        return schema
    gone = {*rounded_keywords(schema, combines=True)}
    kept = {name: value for name, value in schema.items() if name not in gone}
    for name, value in kept.items():
        if name in keywords.MAPS:
            kept[name] = {key: without_rounded(part) for key, part in value.items()}
        elif name in keywords.LISTS:
            kept[name] = [without_rounded(part) for part in value]
        elif name in keywords.SINGLE:
            kept[name] = without_rounded(value)
    return kept


def _refusal(schema: Any, place: str, error: NotWritten) -> RequestError:
    """Names the number at fault, or the first one that the library would change."""
    places = list(_places(schema, place))
    if not places:
        return unsupported(place, f"cannot be held exactly: {error}")
    fitting = [where for where, value in places if _is(value, error)]
    where = (fitting or [places[0][0]])[0]
    return unsupported(where, f"cannot be held exactly: {error}")


def _is(value: Any, error: NotWritten) -> bool:
    if not is_number(value) or error.number is None:
        return False
    return abs(error.number) == abs(value if isinstance(value, Rounded) else fraction(value))


def _places(schema: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The places of a schema's numbers that would be changed, and these."""
    todo = [(place, schema)]
    while todo:
        where, part = todo.pop()
        if not isinstance(part, dict):
            continue
        for keyword in rounded_keywords(part, combines=True):
            yield keywords.join(where, keyword), part[keyword]
        todo += reversed(list(json_schema.parts_of(part, where)))
