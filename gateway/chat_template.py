"""A model's own chat template: a conversation in, the text the model was trained on out.

The template language is Jinja as Hugging Face folders use it: the same whitespace rules, filters
and functions, in a sandbox. Templates come with the model; the messages come from strangers.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import ErrorKind, RequestError
from gateway.generation import Conversation


class _GenerationBlock(Extension):
    """Lets `{% generation %}` through: it marks turns for training and prints nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, conversation: Conversation) -> str:
        """The conversation as text that ends where the assistant's answer begins.

        Raises RequestError with the template's own words when it refuses the conversation.
        """
        messages = [{"role": m.role, "content": m.content} for m in conversation.messages]
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        # A template is a program: besides its own refusals it fails like one.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            problem = f"messages: the model's chat template refuses them: {error}"
            raise RequestError(ErrorKind.INVALID, problem, field="messages") from error


def find_template(config: Mapping[str, Any], file_text: str | None) -> str | None:
    """The template of a model folder; chat_template.jinja wins over tokenizer_config.json.

    The config holds a string, or a list of named templates of which "default" is taken.
    """
    if file_text is not None:
        return file_text
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, as tokenizer_config.json spells them."""
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens
