"""The caches of users who have no home: a container's user id, which no list knows."""

import os
import pwd
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pagewire._connection.peer_token import token_path
from pagewire.settings import home
from tests.pace import patience

ROOT = Path(__file__).parents[3]


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose list of users lacks this one; the folder of temporary files."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_without_a_home_there_is_a_private_folder(nameless: Path) -> None:
    folder = nameless / f"pagewire-{os.getuid()}"
    assert home.home({}) == home.home({}) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert home.cache_root({}) == folder / ".cache" / "pagewire"
    assert token_path(50052, {}).is_relative_to(folder)


def test_a_folder_that_others_can_read_is_closed(nameless: Path) -> None:
    folder = nameless / f"pagewire-{os.getuid()}"
    folder.mkdir(mode=0o777)
    assert home.home({}) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_link_in_the_place_of_the_folder_is_refused(nameless: Path) -> None:
    (nameless / "elsewhere").mkdir()
    (nameless / f"pagewire-{os.getuid()}").symlink_to(nameless / "elsewhere")
    with pytest.raises(PermissionError, match="set HOME or XDG_CACHE_HOME"):
        home.home({})


def test_variables_that_name_a_place_count(nameless: Path, tmp_path: Path) -> None:
    assert home.home({"HOME": str(tmp_path / "new")}) == tmp_path / "new"  # it can be made
    given = {"XDG_CACHE_HOME": "/x", "HOME": str(tmp_path)}
    assert home.cache_root(given) == Path("/x/pagewire")
    assert home.cache_root(given | {"PAGEWIRE_CACHE": "/p"}) == Path("/p")


def test_a_home_that_is_no_folder_is_none(nameless: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    private = nameless / f"pagewire-{os.getuid()}"
    for given in (str(tmp_path / "file"), str(tmp_path / "file" / "below"), "relative"):
        environ = {"HOME": given}
        home.settle(environ)
        assert environ["HOME"] == str(private)


def test_a_process_with_a_home_keeps_it(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    home.settle(environ)
    assert environ == {"HOME": str(tmp_path)}


CACHES = """
import getpass, os, pwd, sys
from pathlib import Path

def unknown(uid):
    raise KeyError(uid)

pwd.getpwuid = unknown
from pagewire.settings import home
home.settle()
from kernels.cpu import build
from worker_svc import config
import huggingface_hub.constants as hub
print(getpass.getuser())
for path in (build.cache_folder(os.environ), config.kernel_cache(), hub.HF_HUB_CACHE,
             home.cache_root()):
    Path(path).mkdir(parents=True, exist_ok=True)
    print(path)
"""


@pytest.mark.parametrize("variables", [{}, {"HOME": "/dev/null"}])
def test_a_user_id_without_name_and_home_has_a_place_for_every_cache(
    variables: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CACHES],
        env={"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(60),
    )
    assert done.returncode == 0, done.stderr
    name, *paths = done.stdout.splitlines()
    assert name == f"uid{os.getuid()}"
    assert all(Path(path).is_relative_to(tmp_path) for path in paths)
