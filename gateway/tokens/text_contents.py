"""Contents of a conversation encoded as text: what spells a token of control there is none.

The tokens that the template writes get names of their own, which no request can know, in the text
and in a second reading of the tokenizer. So everything between them is encoded as ever, and what a
content spells is text to it.
"""

import json
import secrets
from collections.abc import Mapping
from typing import Any

import tokenizers

from gateway.chat.breaks import Breaks, mended


class CannotRename(ValueError):
    """Raised for a tokenizer whose tokens cannot have other names."""


class TextContents:
    """Encodes rendered conversations in which what contents spell is broken."""

    def __init__(self, definition: str, controls: Mapping[str, int]) -> None:
        self.breaks = Breaks(controls)
        prefix = f"<control-{secrets.token_hex(8)}-"
        self._names = {text: f"{prefix}{at}>" for at, text in enumerate(controls)}
        renamed = json.dumps(_renamed(json.loads(definition), self._names))
        self.tokenizer = tokenizers.Tokenizer.from_str(renamed)
        for text, token_id in controls.items():
            if self.tokenizer.token_to_id(self._names[text]) != token_id:
                problem = f"the tokenizer's token {text!r} cannot have another name"
                raise CannotRename(f"--text-contents: {problem}")

    def named(self, rendered: str) -> str:
        """The text for `tokenizer`, with the template's own tokens of control by their names."""
        return mended(self.breaks.whole.sub(lambda token: self._names[token[0]], rendered))


def _renamed(definition: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer's definition with other names for some tokens."""
    for token in definition.get("added_tokens") or []:
        token["content"] = names.get(token["content"], token["content"])
    model = definition["model"]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(text, text), *rest] for text, *rest in vocabulary]
    if model.get("merges"):
        # A merge that makes such a token of its parts would find it in text.
        model["merges"] = [one for one in model["merges"] if not _makes(one, names)]
    return definition


def _makes(merge: str | list[str], names: Mapping[str, str]) -> bool:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    return "".join(parts) in names or any(part in names for part in parts)
