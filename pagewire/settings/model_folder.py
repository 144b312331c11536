"""Why a path given as --model cannot be served, in one sentence. Reads no file's content."""

from pathlib import Path

from pagewire.gguf.files import SUFFIX, is_gguf
from pagewire.ranks import files as ranked

WANTED = "a model is a folder with config.json, tokenizer.json and safetensors, or a GGUF file"
SAFETENSORS = ".safetensors"
TOKENIZER, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
MOST_NAMED = 3


def problem_with(path: Path, needs: str = "config.json") -> str:
    """The problem with a model's path, or empty; `needs` is a file that its folder must hold."""
    if is_gguf(path):
        return "" if path.is_file() else f"there is no file {path}"
    if path.is_file():
        return _problem_with_file(path, needs)
    if not path.exists():
        return f"there is no folder {path}; {WANTED}"
    instead = ranked.FILES if needs == ranked.TOKENIZER else ()
    if not any((path / name).is_file() for name in (needs, *instead)):
        return _problem_with_folder(path, needs)
    return ""


def _problem_with_file(path: Path, needs: str) -> str:
    if path.suffix == SAFETENSORS and (path.parent / needs).is_file():
        return f"{path} is one file of a model: give its folder, {path.parent}"
    if path.suffix == SAFETENSORS:
        return f"{path} is one file of a model, and there is no {needs} next to it; {WANTED}"
    if path.name == needs:
        return f"{path} is one file of a model: give its folder, {path.parent}"
    return f"{path} is a file; {WANTED}"


def _problem_with_folder(path: Path, needs: str) -> str:
    inside = sorted(found.parent for found in path.glob(f"*/{needs}"))
    inside = inside or sorted(found.parent for found in path.glob(f"snapshots/*/{needs}"))
    if inside:
        named = ", ".join(map(str, inside[:MOST_NAMED])) + ", ..." * (len(inside) > MOST_NAMED)
        return f"{path} holds no {needs}, but these do: {named}"
    if files := sorted(map(str, path.glob(f"*{SUFFIX}"))):
        named = ", ".join(files[:MOST_NAMED]) + ", ..." * (len(files) > MOST_NAMED)
        return f"{path} holds no {needs}, but GGUF: give the file, {named}"
    if needs == TOKENIZER and (path / SENTENCEPIECE).is_file():
        return (
            f"{path} holds {SENTENCEPIECE} and no {needs}: load it with transformers' "
            f"AutoTokenizer.from_pretrained, whose save_pretrained writes {needs}"
        )
    return f"{path} holds no {needs}; {WANTED}"
