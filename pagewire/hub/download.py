"""Downloads what is served of a model into the cache of huggingface_hub, and nothing else.

The library's own variables count: HF_HOME and HF_HUB_CACHE (the cache), HF_ENDPOINT (the hub),
HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_DISABLE_XET and its time limits. What is in the cache is not
transferred again, and without network it is enough.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pagewire.hub.names import ModelName
from pagewire.hub.weights_index import INDEX, SINGLE, BadIndex, file_of_each_tensor
from pagewire.ranks import files as ranked

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
SMALL_FILES = (
    CONFIG,
    TOKENIZER,
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".safetensors", ".onnx", ".h5", ".msgpack")
HTTP_LIBRARIES = ("httpx", "httpx2")

log = logging.getLogger("pagewire.hub")


class ModelUnavailable(Exception):
    """A model cannot be had; the message is one sentence that says why."""


def download(name: ModelName, *, with_weights: bool) -> Path:
    """The folder of a model: its configuration, tokenizer and, if wanted, its safetensors.

    Raises ModelUnavailable.
    """
    with _explained(name):
        folder = _fetch(name, name.revision, SMALL_FILES)
        # The commit that the first files are of, should the branch move on meanwhile.
        commit = folder.name
        if not (folder / TOKENIZER).is_file():
            _fetch(name, commit, ranked.FILES)
        for file, *instead in ((CONFIG,), (TOKENIZER, *ranked.FILES)):
            if not any((folder / one).is_file() for one in (file, *instead)):
                raise _missing(name, commit, file)
        if with_weights:
            _fetch_weights(name, commit, folder)
    return folder


def _fetch_weights(name: ModelName, commit: str, folder: Path) -> None:
    """Fetches the one file, which wins over an index as it does when it is read, or the others."""
    if not (folder / INDEX).is_file():  # which is fetched where there is no single file
        _fetch_large(name, commit, folder, [SINGLE])
    if (folder / SINGLE).is_file():
        return
    _fetch(name, commit, (INDEX,))
    if not (folder / INDEX).is_file():
        raise _missing(name, commit, SINGLE)
    files = _indexed(folder / INDEX)
    _fetch_large(name, commit, folder, files)
    for file in files:
        if not (folder / file).is_file():
            raise _missing(name, commit, file)


def _fetch_large(name: ModelName, commit: str, folder: Path, files: Sequence[str]) -> None:
    """Fetches those of the files that the repository has and the folder lacks."""
    lacking = [file for file in files if not (folder / file).is_file()]
    if lacking:
        _store(name, commit, lacking)
        _fetch(name, commit, lacking)


def _store(name: ModelName, commit: str, files: Sequence[str]) -> None:
    """Gets large files in a way that goes on after an interruption, where there is a network."""
    from huggingface_hub import constants  # noqa: PLC0415

    from pagewire.hub import resume  # noqa: PLC0415
    from pagewire.hub.progress import ProgressLine  # noqa: PLC0415

    if constants.is_offline_mode():
        return
    line = ProgressLine(f"downloading {name}")
    try:
        resume.store(name, commit, files, line)
    finally:
        line.clear()


def _indexed(path: Path) -> list[str]:
    """The files of the weights. Raises ModelUnavailable."""
    try:
        return sorted(set(file_of_each_tensor(path).values()))
    except BadIndex as error:
        raise ModelUnavailable(str(error)) from None


def _fetch(name: ModelName, revision: str, files: Collection[str]) -> Path:
    """The folder with those of the files that the repository has."""
    import huggingface_hub  # noqa: PLC0415 - for names alone; a folder is served without it

    from pagewire.hub.progress import ProgressLine, meter  # noqa: PLC0415

    line = ProgressLine(f"downloading {name}")
    try:
        folder = huggingface_hub.snapshot_download(
            name.repository,
            revision=revision,
            allow_patterns=[_literal(file) for file in files],
            library_name="pagewire",
            tqdm_class=meter(line),
        )
    finally:
        line.clear()
    return Path(folder)


def _literal(file: str) -> str:
    """A pattern that only this file matches."""
    return file.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]")


def _missing(name: ModelName, commit: str, file: str) -> ModelUnavailable:
    """Why there is no such file: what the repository holds instead. Raises the hub's errors."""
    import huggingface_hub  # noqa: PLC0415

    if file in SMALL_FILES:
        return ModelUnavailable(f"{name} holds no {file}")
    if file != SINGLE:
        return ModelUnavailable(f"{name} holds no {file}, which its {INDEX} names")
    files = huggingface_hub.list_repo_files(name.repository, revision=commit)
    others = [found for found in files if found.endswith(OTHER_WEIGHTS)]
    what = f"no others are read, and it has {others[0]}" if others else "nor any others"
    return ModelUnavailable(f"{name} holds no {SINGLE} and no {INDEX}: {what}")


@contextmanager
def _explained(name: ModelName) -> Iterator[None]:
    """Raises what goes wrong as ModelUnavailable; the library's own warnings are left out."""
    from huggingface_hub.utils import logging as hub_logging  # noqa: PLC0415

    from pagewire.hub.refusals import explain  # noqa: PLC0415

    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    for library in HTTP_LIBRARIES:  # they log every request
        logging.getLogger(library).setLevel(logging.WARNING)
    try:
        yield
    except ModelUnavailable:
        raise
    except Exception as error:  # of the network, the disk and two libraries
        log.debug("%s", name, exc_info=True)
        raise ModelUnavailable(explain(error, name)) from error
    finally:
        hub_logging.set_verbosity(before)
