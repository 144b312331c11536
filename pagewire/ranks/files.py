"""tokenizer.json and tokenizer_config.json of a folder with another tokenizer's file instead."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from pagewire.ranks import tekken, tiktoken

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
FILES = (tekken.FILE, tiktoken.FILE)  # the first one that is there counts


def read(folder: Path, name: str) -> bytes | None:
    """The content of a file that a folder lacks; None where no other says it. Raises BadRanks."""
    if (folder / TOKENIZER).is_file():
        return None
    found = next((folder / file for file in FILES if (folder / file).is_file()), None)
    if found is None or name not in (TOKENIZER, CONFIG):
        return None
    if name == CONFIG:
        if found.name != tekken.FILE:
            return None
        return _json(tekken.tokenizer_config(found.read_bytes()))
    config = folder / CONFIG
    settings = config.read_bytes() if config.is_file() else None
    status = found.stat()
    return _tokenizer(found, settings, status.st_mtime_ns, status.st_size)


# Seconds for a large file, which a process asks for more than once.
@lru_cache(maxsize=1)
def _tokenizer(path: Path, settings: bytes | None, changed_ns: int, num_bytes: int) -> bytes:
    content = path.read_bytes()
    if path.name == tekken.FILE:
        return _json(tekken.tokenizer(content))
    return _json(tiktoken.tokenizer(content, settings))


def _json(content: dict[str, Any]) -> bytes:
    # The same bytes on every machine: gateway and worker compare hashes.
    return (json.dumps(content, ensure_ascii=False) + "\n").encode()
