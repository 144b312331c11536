"""Tokenizer folders are read as transformers reads them; unreadable ones are refused."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import transformers

from gateway.chat.conversation import Conversation, Message
from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.tokens.tokenizer import INLINE_BYTES, Tokenizer, TokenizerFolderError

CHATML = Conversation(
    (
        Message("system", "You are helpful."),
        Message("user", "Hello 😀 <b>&</b>\n  spaces  "),
        Message("assistant", "中文"),
        Message("user", "naïve?"),
    )
)
# Whitespace control, filters, loop variables, macros, namespaces, loop controls, special tokens.
RICH_TEMPLATE = """{{- bos_token }}
{%- set ns = namespace(count=0) %}
{%- macro turn(message) %}<|im_start|>{{ message['role'] | upper }}
{{ message.content | trim }}<|im_end|>{% endmacro %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% set ns.count = ns.count + 1 %}
    {% if message.role == 'assistant' %}
{% generation %}{{ turn(message) }}{% endgeneration %}
    {% else %}
{{ turn(message) }} {{ message | tojson }} {{ {'z': 1, 'a': '<é>'} | tojson(indent=2) }}
    {% endif %}
    {% if loop.last %}{% break %}{% endif %}
{% endfor %}
{% if tools %}never{% endif %}{{ ns.count }} {{ unk_token }}{{ eos_token }}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def folder_with(model_folder: Path, target: Path, **config: object) -> Path:
    shutil.copytree(model_folder, target)
    path = target / "tokenizer_config.json"
    merged = json.loads(path.read_text()) | config
    path.write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))
    return target


@pytest.mark.parametrize("kind", ["config string", "config list", "file"])
@pytest.mark.parametrize("rich", [False, True])
async def test_a_chat_has_the_ids_that_transformers_gives_it(
    kind: str, rich: bool, model_folder: Path, tmp_path: Path
) -> None:
    plain = json.loads((model_folder / "tokenizer_config.json").read_text())["chat_template"]
    source = RICH_TEMPLATE if rich else plain
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": source}]
    template = {"config string": source, "config list": named, "file": None}[kind]
    folder = folder_with(model_folder, tmp_path / "model", chat_template=template)
    if kind == "file":
        (folder / "chat_template.jinja").write_text(source)

    tokenizer = Tokenizer.from_folder(folder)
    text = tokenizer.render(CHATML)
    ids = await tokenizer.encode("messages", text, add_special_tokens=False)

    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": m.role, "content": m.content} for m in CHATML.messages]
    options = {"add_generation_prompt": True}
    assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
    assert ids == theirs.apply_chat_template(messages, return_dict=False, **options)


def test_a_template_can_refuse_a_conversation_in_its_own_words(
    model_folder: Path, tmp_path: Path
) -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    folder = folder_with(model_folder, tmp_path / "model", chat_template=source)
    with pytest.raises(RequestError, match="roles must alternate") as refusal:
        Tokenizer.from_folder(folder).render(CHATML)
    assert (refusal.value.kind, refusal.value.field) == (ErrorKind.INVALID, "messages")


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content + 1 }}", "{{ ''.__class__.__mro__ }}", "{{ nothing.at.all }}"],
)
def test_a_template_that_fails_refuses_the_conversation(
    source: str, model_folder: Path, tmp_path: Path
) -> None:
    folder = folder_with(model_folder, tmp_path / "model", chat_template=source)
    with pytest.raises(RequestError, match="chat template"):
        Tokenizer.from_folder(folder).render(CHATML)


def test_strftime_now_gives_the_date(model_folder: Path, tmp_path: Path) -> None:
    folder = folder_with(
        model_folder, tmp_path / "model", chat_template="{{ strftime_now('%Y') | int > 2000 }}"
    )
    assert Tokenizer.from_folder(folder).render(CHATML) == "True"


def test_chat_without_a_template_is_refused(model_folder: Path, tmp_path: Path) -> None:
    folder = folder_with(model_folder, tmp_path / "model", chat_template=None)
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.from_folder(folder).render(CHATML)


def test_the_hash_is_that_of_the_file(model_folder: Path, tokenizer: Tokenizer) -> None:
    content = (model_folder / "tokenizer.json").read_bytes()
    assert tokenizer.sha256 == hashlib.sha256(content).hexdigest()


async def test_truncation_and_padding_in_the_file_are_not_applied(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = folder_with(model_folder, tmp_path / "model")
    changed = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    changed.enable_truncation(3)
    changed.enable_padding(length=50)
    changed.save(str(folder / "tokenizer.json"))
    text = "Hello world, how are you today?"
    ids = await Tokenizer.from_folder(folder).encode("prompt", text, add_special_tokens=True)
    assert len(ids) not in (3, 50)
    assert changed.decode(ids) == text


async def test_long_texts_have_the_same_ids_as_short_ones(
    tokenizer: Tokenizer, encode: object
) -> None:
    text = "Hello world " * INLINE_BYTES
    ids = await tokenizer.encode("prompt", text, add_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


async def test_a_hopelessly_long_text_is_refused_before_it_is_tokenized(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "_encode", None)
    with pytest.raises(RequestError, match=r"more than \d+ tokens") as refusal:
        await tokenizer.encode("prompt", "a" * 100_000, add_special_tokens=True, max_tokens=256)
    assert refusal.value.kind is ErrorKind.TOO_LONG


async def test_a_text_that_is_far_too_long_is_refused_by_its_start(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    whole = Tokenizer._encode_aside

    def counted(self: Tokenizer, text: str, adds: bool) -> list[int]:
        lengths.append(len(text))
        return whole(self, text, adds)

    monkeypatch.setattr(Tokenizer, "_encode_aside", counted)
    text = "Hello world, 1234! " * 1000
    with pytest.raises(RequestError, match="more than 500 tokens") as refusal:
        await tokenizer.encode("prompt", text, add_special_tokens=False, max_tokens=500)
    assert refusal.value.kind is ErrorKind.TOO_LONG and refusal.value.field == "prompt"
    assert lengths == [1000, 4000]
    lengths.clear()
    assert await tokenizer.encode("prompt", text, add_special_tokens=False, max_tokens=20_000)
    assert lengths == [len(text)], "what may fit is tokenized once"


@pytest.mark.parametrize("content", [None, b"{", b'{"model": {"type": "Nonsense"}}', b"\xff"])
def test_a_folder_without_a_readable_tokenizer_is_refused(
    content: bytes | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerFolderError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
