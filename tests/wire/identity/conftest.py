"""Two authorities, each with a certificate for this machine."""

import shutil
from pathlib import Path

import pytest

from pagewire.cli.launcher.certificates import MadeCertificates, make_certificates


@pytest.fixture(scope="session")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MadeCertificates]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl")
    folder = tmp_path_factory.mktemp("authorities")
    return {name: make_certificates(folder / name) for name in ("first", "second")}


@pytest.fixture
def served(authorities: dict[str, MadeCertificates], tmp_path: Path) -> MadeCertificates:
    """The first certificate, in files of the test's own."""
    mine = MadeCertificates(*(tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem")))
    copy(authorities["first"], mine)
    return mine


def copy(source: MadeCertificates, target: MadeCertificates) -> None:
    """Replaces certificate and key, each at once."""
    for wanted, path in ((source.key, target.key), (source.cert, target.cert)):
        fresh = path.with_suffix(".new")
        shutil.copy(wanted, fresh)
        fresh.replace(path)
