"""The blocking client is the asyncio one without its waiting.

PAGEWIRE_WRITE_CLIENT=1 writes it anew.
"""

import os
from pathlib import Path

import pagewire

FOLDER = Path(pagewire.__file__).parent
# What is replaced in `_aio.py`, in this order.
REPLACED = (
    ("asyncio client: starts calls and awaits", "blocking client: starts calls and waits for"),
    ("`_client.py` is made of this file", "It is made of `_aio.py`"),
    (", for one event loop.", "; may be shared between threads."),
    ("async ", ""),
    ("await ", ""),
    ("AsyncClient", "Client"),
    ("AsyncStream", "Stream"),
    ("AioStubs", "Stubs"),
    ("aio_", ""),
    ("grpc.aio", "grpc"),
    ("__aenter__", "__enter__"),
    ("__aexit__", "__exit__"),
)


def test_the_blocking_client_is_made_of_the_asyncio_one() -> None:
    source = (FOLDER / "_aio.py").read_text()
    for old, new in REPLACED:
        assert old in source, f"nothing to replace: {old}"
        source = source.replace(old, new)
    file = FOLDER / "_client.py"
    if os.environ.get("PAGEWIRE_WRITE_CLIENT"):
        file.write_text(source)
    assert file.read_text() == source
