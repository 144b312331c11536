"""Names of models, and who takes them: a folder here wins."""

from pathlib import Path

import pytest

from pagewire.hub.locate import LocatedModel, locate
from pagewire.hub.names import ModelName, parse
from tests.pagewire.hub.conftest import Run
from tests.pagewire.hub.stand_in import Hub, Repository
from tests.pagewire.launcher.run_of_up import PORT_OPTIONS
from tests.ports import free_port

FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", ModelName("org/name", "main")),
        ("Qwen/Qwen3-0.6B@v1.0", ModelName("Qwen/Qwen3-0.6B", "v1.0")),
        ("org/name@refs/pr/1", ModelName("org/name", "refs/pr/1")),
        ("org/name@", None),
        ("name", None),
        ("./org/name", None),
        ("../name", None),
        ("/org/name", None),
        ("~/name", None),
        ("org/name/deeper", None),
        ("org/na..me", None),
        ("org/name.gguf", None),
        ("models/model.safetensors", None),
    ],
)
def test_a_name_has_one_slash_and_perhaps_a_revision(text: str, name: ModelName | None) -> None:
    assert parse(text) == name


def test_a_folder_here_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for spelling in ("org/name", "org/name@v1"):
        Path(spelling).mkdir(parents=True)
        assert locate(Path(spelling), with_weights=True) == LocatedModel(Path(spelling))


def test_what_is_neither_is_left_to_the_caller() -> None:
    assert locate(Path("/nowhere"), with_weights=True) == LocatedModel(Path("/nowhere"))


def test_the_worker_takes_a_name_and_serves_it_by_that(hub: Hub, run: Run) -> None:
    hub.repositories["org/one"] = Repository({"main": FILES})
    show = (
        "from sys import argv; from worker_svc.config import parse; options = parse(argv[1:]); "
        "print(options.served_model_name, *sorted(p.name for p in options.model.iterdir()))"
    )
    done = run("-c", show, "--model", "org/one@main")
    assert (done.stdout, done.stderr) == (" ".join(["org/one", *sorted(FILES)]) + "\n", "")
    given = run("-c", show, "--model", "org/one", "--served-model-name", "mine")
    assert given.stdout.startswith("mine ")


@pytest.mark.parametrize(
    ("module", "more"),
    [("worker_svc", ()), ("gateway", ("--scheduler", "127.0.0.1:1"))],
)
def test_a_service_ends_with_one_sentence(
    module: str, more: tuple[str, ...], hub: Hub, run: Run
) -> None:
    done = run("-m", module, "--model", "org/none", *more)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "--model: org/none is neither a folder here nor a repository" in line


def test_up_ends_with_one_sentence(hub: Hub, run: Run) -> None:
    ports = [word for option in PORT_OPTIONS for word in (option, str(free_port()))]
    done = run("-m", "pagewire", "up", "--model", "org/none", "--no-sample", *ports)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "--model: org/none is neither a folder here nor a repository" in line
