"""The page at /docs: the OpenAPI description as plain HTML, without a script or a foreign host."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

Json = Mapping[str, Any]

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "code{font-family:ui-monospace,monospace}table{border-collapse:collapse;width:100%}"
    "td,th{border-bottom:1px solid #ccc;padding:.2em .6em;text-align:left;vertical-align:top}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}a{color:#8bf}}"
)


def page(description: Json) -> str:
    """The HTML of an OpenAPI description."""
    title = escape(description["info"]["title"])
    about = escape(description["info"].get("description", ""))
    body = "".join(_operations(description)) + "".join(_schemas(description))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><p>{about}</p>"
        '<p>For programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{body}</body></html>\n"
    )


def _operations(description: Json) -> Iterator[str]:
    yield "<h2>Routes</h2><table><tr><th>route</th><th>body</th></tr>"
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            route = f"{method.upper()} {path}"
            yield f"<tr><td><code>{escape(route)}</code></td><td>{_kind(schema)}</td></tr>"
    yield "</table>"


def _schemas(description: Json) -> Iterator[str]:
    for name, schema in description.get("components", {}).get("schemas", {}).items():
        fields = schema.get("properties", {})
        if not fields:
            continue
        yield f'<h2 id="{escape(name)}">{escape(name)}</h2>'
        yield "<table><tr><th>field</th><th>type</th></tr>"
        for field, kind in fields.items():
            need = " (required)" if field in schema.get("required", ()) else ""
            yield f"<tr><td><code>{escape(field)}</code>{need}</td><td>{_kind(kind)}</td></tr>"
        yield "</table>"


def _kind(schema: Json) -> str:
    """A type in words, with links to those described on the page."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for form in ("anyOf", "oneOf", "allOf"):
        if form in schema:
            return " or ".join(dict.fromkeys(_kind(choice) for choice in schema[form]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {})) or 'values'}"
    return escape(str(schema.get("type", "")))
