"""The model's tokenizer, read from its folder: converts text and conversations to ids and back."""

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from gateway.callers.text_turns import DEFAULT_LIMITS, TextLimits, TextTurns
from gateway.chat.breaks import is_broken
from gateway.chat.conversation import Conversation
from gateway.chat.template import (
    ChatTemplate,
    find_templates,
    special_tokens,
    template_file,
)
from gateway.errors import limits
from gateway.errors.request_errors import ErrorKind, RequestError, unsupported
from gateway.text.detokenizer import (
    META_SPACE,
    ByteLevelDetokenizer,
    Detokenizer,
    Vocabulary,
    WindowDetokenizer,
)
from gateway.tokens.text_contents import TextContents
from pagewire.gguf.files import file_in, read_file
from pagewire.ranks.byte_pairs import BadRanks

# Below this a thread costs more than the tokenization.
INLINE_BYTES = 4096
INLINE_CHARACTERS = 16384  # of a conversation that is rendered
# A prompt may have so many bytes per token that the model reads: few texts have more.
BYTES_PER_TOKEN = 16
# Characters per token of room: the starts of a text whose tokens tell whether the rest can fit.
# What is far too long is known by a small part of it, which costs little memory.
START_CHARS_PER_TOKEN = (2, 8)
# Where the start is cut, its last tokens may differ from those of the whole text.
START_SLACK_TOKENS = 64
NOTHING: frozenset[int] = frozenset()


class TokenizerFolderError(ValueError):
    """Raised when a folder has no readable tokenizer."""


class Tokenizer:
    """One tokenizer.json with the settings of its tokenizer_config.json."""

    def __init__(self, definition: bytes, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(definition.decode())
        # A file may have truncation and padding of training; serving uses neither.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.template = template
        self._vocabulary = Vocabulary(self._tokenizer)
        parsed = json.loads(definition)
        self._is_byte_level = _is_byte_level(parsed.get("decoder"))
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._max_token_bytes: int | None = None
        if self._is_byte_level and _keeps_every_byte(parsed):
            self._max_token_bytes = max((len(token.encode()) for token in vocabulary), default=1)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # every id is below
        self.sha256 = hashlib.sha256(definition).hexdigest()
        self._limits = DEFAULT_LIMITS
        self._turns = TextTurns(self._limits)
        self._contents: TextContents | None = None  # None: contents may spell tokens of control

    @classmethod
    def from_folder(cls, folder: Path, chat_template: Path | None = None) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja, or a GGUF file.

        In place of the first tekken.json or tiktoken.model are read. A chat template given, a file
        or the name of one of ours, replaces the model's. Raises TokenizerFolderError, or BadGguf.
        """
        path = file_in(folder, "tokenizer.json")
        try:
            definition = read_file(folder, "tokenizer.json")
            config = _read_config(folder)
        except BadRanks as error:
            raise TokenizerFolderError(f"{folder}: {error}") from error
        if definition is None:
            raise TokenizerFolderError(f"{path} does not exist")
        template = _read_template(folder, config, chat_template)
        try:
            return cls(definition, template)
        except Exception as error:  # the Rust library raises nothing more precise
            raise TokenizerFolderError(f"{path} is no tokenizer: {error}") from error

    def markers(self) -> tuple[dict[str, int], tuple[int, ...]]:
        """Ids of the tokens that are added to the vocabulary, by text, and those not special."""
        added = self._tokenizer.get_added_tokens_decoder()
        ids = {token.content: number for number, token in added.items()}
        return ids, tuple(number for number, token in added.items() if not token.special)

    def spelled(self, token_id: int) -> str:
        """The text of a token of control, as templates write it; empty for an unknown one."""
        found: str | None = self._tokenizer.id_to_token(token_id)
        return found or ""

    def definition(self) -> str:
        """The content of its tokenizer.json, without truncation and padding."""
        text: str = self._tokenizer.to_str()
        return text

    def limited(self, limits: TextLimits) -> "Tokenizer":
        """The same tokenizer with limits of its own, for one gateway."""
        other = copy.copy(self)
        other._limits, other._turns = limits, TextTurns(limits)
        return other

    def with_text_contents(self) -> "Tokenizer":
        """The same tokenizer, to which the contents of conversations are text alone.

        Tokens of control are the special ones, and others that the chat template writes, apart
        from spaces and ends of lines. Raises CannotRename.
        """
        other, template = copy.copy(self), self.template
        if template is not None:
            added = self._tokenizer.get_added_tokens_decoder()
            written = template.source + template.tools_source
            controls = {
                token.content: number
                for number, token in added.items()
                if token.content and (token.special or _is_written(token.content, written))
            }
            other._contents = TextContents(self.definition(), controls)
            other.template = template.breaking(other._contents.breaks)
        return other

    def with_tools_in_words(self) -> "Tokenizer":
        """The same tokenizer, with a template that is told of tools in plain words."""
        other = copy.copy(self)
        other.template = None if self.template is None else self.template.told_in_words()
        return other

    def _for_names(self, contents: TextContents) -> "Tokenizer":
        """The encoder of a text in which the template's tokens of control have names."""
        other = copy.copy(self)
        other._tokenizer, other._contents = contents.tokenizer, None
        other._max_token_bytes = None  # names are longer than the tokens
        return other

    async def encode(
        self,
        field: str,
        text: str,
        *,
        add_special_tokens: bool,
        max_tokens: int | None = None,
        max_model_len: int = 0,
    ) -> list[int]:
        """The ids of a text; a long one is tokenized off the event loop, callers in turn.

        Raises RequestError for a text that cannot fit into max_tokens, by its length or its start:
        tokenizing a megabyte to refuse it would keep a core from the requests that run. Prompts
        tell `max_model_len`, for which their text may be longer than others.
        """
        if self._contents is not None and field == "messages" and is_broken(text):
            return await self._for_names(self._contents).encode(
                field,
                self._contents.named(text),
                add_special_tokens=add_special_tokens,
                max_tokens=max_tokens,
                max_model_len=max_model_len,
            )
        self._check_length(field, len(text), max_model_len)  # it has at least as many bytes
        num_bytes = len(limits.utf8(field, text))
        if max_tokens is not None and self._max_token_bytes is not None:
            fewest = num_bytes // self._max_token_bytes
            if fewest > max_tokens:
                raise too_long(field, f"more than {fewest} tokens", max_tokens)
        if num_bytes <= INLINE_BYTES:
            return self._encode(text, add_special_tokens)
        self._check_length(field, num_bytes, max_model_len)
        work = partial(self._encode_if_short, field, text, add_special_tokens, max_tokens)
        return await self._turns.run(field, num_bytes, work)

    async def count(self, conversation: Conversation) -> int:
        """The number of tokens of a conversation. Raises RequestError."""
        text = await self.write(conversation)
        return len(await self.encode("messages", text, add_special_tokens=False))

    async def encode_all(self, field: str, texts: Sequence[str]) -> list[list[int]]:
        """The ids of some texts, without special tokens. Raises RequestError."""
        num_bytes = sum(len(limits.utf8(field, text)) for text in texts)
        self._check_length(field, num_bytes, 0)
        work = partial(self._encode_each, texts)
        return (
            work() if num_bytes <= INLINE_BYTES else await self._turns.run(field, num_bytes, work)
        )

    def _encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode_aside(text, add_special_tokens=False) for text in texts]

    def _check_length(self, field: str, num_bytes: int, max_model_len: int) -> None:
        """Raises RequestError for a text that would take too much memory."""
        most = max(self._limits.max_text, BYTES_PER_TOKEN * max_model_len)
        if num_bytes <= most:
            return
        if max_model_len:
            raise too_long(field, f"{num_bytes} bytes (--max-tokenize-mib)", max_model_len)
        problem = f"{num_bytes} bytes, at most {most} are tokenized (--max-tokenize-mib)"
        raise RequestError(ErrorKind.BODY_TOO_LARGE, f"{field}: {problem}", field=field)

    def _encode_if_short(
        self, field: str, text: str, add_special_tokens: bool, max_tokens: int | None
    ) -> list[int]:
        """The ids, if the text's starts leave it a chance to fit. Raises RequestError."""
        for per_token in START_CHARS_PER_TOKEN if max_tokens is not None else ():
            assert max_tokens is not None
            start = text[: per_token * max_tokens]
            if len(text) > 2 * len(start):
                num_tokens = len(self._encode_aside(start, add_special_tokens))
                if num_tokens > max_tokens + START_SLACK_TOKENS:
                    raise too_long(field, f"more than {max_tokens} tokens", max_tokens)
        return self._encode_aside(text, add_special_tokens)

    def _encode_aside(self, text: str, add_special_tokens: bool) -> list[int]:
        """The same ids; unlike `encode`, a batch releases the interpreter while it is encoded."""
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids: list[int] = batch[0].ids
        return token_ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        token_ids: list[int] = encoding.ids
        return token_ids

    async def write(self, conversation: Conversation) -> str:
        """The same as `render`; a long conversation is rendered off the event loop.

        With text contents it has marks, which `encode` reads and `mended` takes out.
        """
        if sources := conversation.pictures:
            raise unsupported(sources[0].place, "pictures are read where an answer is made alone")
        return await self.write_around(conversation)

    async def write_around(self, conversation: Conversation) -> str:
        """The same of a conversation that may have pictures: their marks stand for them."""
        if conversation.num_characters <= INLINE_CHARACTERS:
            return self.render(conversation)
        work = partial(self.render, conversation)
        return await self._turns.run("messages", conversation.num_characters, work)

    def render(self, conversation: Conversation) -> str:
        """The conversation as text, by the model's chat template. Raises RequestError."""
        if self.template is None:
            problem = "the model has no chat template: use a completion with a plain prompt"
            raise RequestError(ErrorKind.UNSUPPORTED, f"messages: {problem}", field="messages")
        return self.template.render(conversation)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole list of ids."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def spell(self, token_id: int) -> bytes:
        """The bytes that one id adds to a text, maybe an incomplete character; empty if unknown."""
        if self._is_byte_level:
            return self._vocabulary.byte_table(NOTHING)[token_id]
        return self._vocabulary.spell_piece(token_id)

    def detokenizer(
        self, *, skip_special_tokens: bool, shown_tokens: Iterable[str] = ()
    ) -> Detokenizer:
        """A new detokenizer for one output; shown_tokens are never skipped."""
        form = ByteLevelDetokenizer if self._is_byte_level else WindowDetokenizer
        hidden_ids = self._vocabulary.hidden_ids(
            skip_special_tokens=skip_special_tokens, shown_tokens=shown_tokens
        )
        return form(self._vocabulary, hidden_ids)

    def hidden_tokens(
        self, *, skip_special_tokens: bool, shown_tokens: Iterable[str] = ()
    ) -> Mapping[str, int]:
        """Ids of the tokens that such a detokenizer leaves out, by their text."""
        hidden_ids = self._vocabulary.hidden_ids(
            skip_special_tokens=skip_special_tokens, shown_tokens=shown_tokens
        )
        return self._vocabulary.texts_of(hidden_ids)


def too_long(field: str, length: str, max_model_len: int) -> RequestError:
    """An error for a prompt that leaves no room for one token of output."""
    # Clients shorten a conversation when they read one of these: litellm "maximum context length
    # is", langchain with openai's newest package, which does not show it the code, the first.
    what = f"the prompt is too long: {length}"
    room = f"this model's maximum context length is {max_model_len} tokens"
    problem = f"{what}, but {room}, for the prompt and at least one token of output"
    return RequestError(ErrorKind.TOO_LONG, f"{field}: {problem}", field=field)


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = file_in(folder, "tokenizer_config.json")
    content = read_file(folder, "tokenizer_config.json")
    if content is None:
        return {}
    try:
        config = json.loads(content)
    except ValueError as error:
        raise TokenizerFolderError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise TokenizerFolderError(f"{path} is not a JSON object")
    return config


def _read_template(
    folder: Path, config: Mapping[str, Any], given: Path | None
) -> ChatTemplate | None:
    """The template given, else of the folder. Raises TokenizerFolderError."""
    name = "--chat-template" if given is not None else f"the chat template in {folder}"
    file = folder / "chat_template.jinja" if given is None else template_file(given)
    try:
        text = file.read_text("utf-8") if given is not None or file.is_file() else None
        source, tools_source = find_templates(config, text)
        if source is None:
            return None
        return ChatTemplate(source, special_tokens(config), tools_source)
    except OSError as error:
        raise TokenizerFolderError(f"{name}: {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TokenizerFolderError(f"{name}: {file} is not UTF-8 text") from error
    except jinja2.TemplateSyntaxError as error:
        problem = f"is no Jinja template: line {error.lineno}: {error.message}"
        place = f": {file}" if text is not None else ""
        raise TokenizerFolderError(f"{name}{place} {problem}") from error


def _is_written(token: str, template: str) -> bool:
    return token in template and bool(token.replace(META_SPACE, "").strip())


def _keeps_every_byte(definition: Mapping[str, Any]) -> bool:
    """True if no step drops text, so that a token covers no more bytes than it spells."""
    added = definition.get("added_tokens") or []
    swallows_spaces = any(token.get("lstrip") or token.get("rstrip") for token in added)
    return definition.get("normalizer") is None and not swallows_spaces


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", [])
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"
