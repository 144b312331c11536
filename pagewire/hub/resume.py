"""Weights over plain HTTP: what a download that ended early has got is kept, and the next goes on.

huggingface_hub goes on after a cut connection, but deletes what it has when its process ends. Here
a file grows next to the library's own, and when it is complete it gets the name by which the
library finds it. Files that a hub offers in chunks (xet) are left to the library.
"""

import fcntl
import hashlib
import importlib.util
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from huggingface_hub import constants, get_hf_file_metadata, get_session, hf_hub_url
from huggingface_hub.file_download import HfFileMetadata, repo_folder_name
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    hf_raise_for_status,
)

from pagewire.hub.names import ModelName
from pagewire.hub.progress import ProgressLine

PARALLEL = 4
ATTEMPTS, PAUSE_S = 5, 1.0  # in a row that bring nothing, and the time between them
SHA256_DIGITS = 64
HASH_BYTES = 1 << 20


def store(name: ModelName, commit: str, files: Sequence[str], line: ProgressLine) -> None:
    """Puts files of a repository into the cache, as far as they come over plain HTTP.

    What cannot be had is left out: the library, asked next, says why.
    """
    download = _Download(name, commit, line)
    with ThreadPoolExecutor(PARALLEL) as pool:
        try:
            for _ in pool.map(download.store, files):
                pass
        finally:
            download.stopped.set()  # the pool waits for what runs


class _Download:
    def __init__(self, name: ModelName, commit: str, line: ProgressLine) -> None:
        self.stopped = threading.Event()
        self._name = name
        self._commit = commit
        self._line = line
        self._received: dict[str, tuple[int, int]] = {}  # by file: bytes, and bytes of all
        folder = repo_folder_name(repo_id=name.repository, repo_type="model")
        self._blobs = Path(constants.HF_HUB_CACHE) / folder / "blobs"

    def store(self, file: str) -> None:
        """Completes one file, unless it is there or is the library's to fetch."""
        url = hf_hub_url(self._name.repository, file, revision=self._commit)
        try:
            found = get_hf_file_metadata(url)
        except Exception:
            return
        if found.etag is None or found.size is None:
            return
        if found.xet_file_data is not None and _has_xet():
            return
        whole, part = self._blobs / found.etag, self._blobs / f"{found.etag}.pagewire"
        if whole.exists():
            return
        self._blobs.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as out:
            fcntl.flock(out, fcntl.LOCK_EX)
            # Another process may have completed it meanwhile.
            if not whole.exists():
                self._complete(file, url, found.size, out)
                if not _fits(part, found.etag):
                    out.truncate(0)
                    self._complete(file, url, found.size, out)
                part.rename(whole)

    def _complete(self, file: str, url: str, size: int, out: BinaryIO) -> None:
        """Appends until all is there. Raises the last error when nothing comes any more."""
        failures = 0
        while (before := out.seek(0, 2)) != size:
            try:
                self._receive(file, get_hf_file_metadata(url), out)
            except OSError:  # of the disk, or an answer that refuses
                raise
            except Exception:  # of the network
                failures = failures + 1 if out.tell() == before else 0
                if failures >= ATTEMPTS or self.stopped.wait(PAUSE_S):
                    raise
        out.flush()

    def _receive(self, file: str, found: HfFileMetadata, out: BinaryIO) -> None:
        """Appends what one answer brings."""
        size = found.size or 0
        if out.tell() > size:
            out.truncate(0)
        headers = build_hf_headers(library_name="pagewire") | {"accept-encoding": "identity"}
        if urlsplit(found.location).netloc != urlsplit(constants.ENDPOINT).netloc:
            headers.pop("authorization", None)  # it is the hub's
        if start := out.seek(0, 2):
            headers["range"] = f"bytes={start}-"
        with get_session().stream(
            "GET", found.location, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
        ) as response:
            hf_raise_for_status(response)
            if response.status_code != 206:
                out.truncate(0)
            for chunk in response.iter_raw():
                if self.stopped.is_set():
                    raise TimeoutError("the download was stopped")
                out.write(chunk)
                self._tell(file, out.tell(), size)

    def _tell(self, file: str, num_bytes: int, size: int) -> None:
        self._received[file] = num_bytes, size
        received = list(self._received.values())
        self._line.show(sum(done for done, _ in received), sum(whole for _, whole in received))


def _has_xet() -> bool:
    return not constants.HF_HUB_DISABLE_XET and importlib.util.find_spec("hf_xet") is not None


def _fits(path: Path, etag: str) -> bool:
    """True if a file is what its name says; true where the name is no hash of it."""
    if len(etag) != SHA256_DIGITS:
        return True
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == etag
