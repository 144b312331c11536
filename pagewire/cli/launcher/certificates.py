"""Test certificates for this machine, made by the command `openssl`: an authority and a server's.

For trying TLS out. The authority's key lies next to them, so trust it for nothing else.
"""

import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pagewire.cli.options import CommandError

DAYS = "30"
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_CONFIG = """
[req]
distinguished_name = name
prompt = no
[name]
CN = {name}
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {alternatives}
"""


@dataclass(frozen=True, slots=True)
class MadeCertificates:
    """Paths of PEM files."""

    ca: Path
    cert: Path
    key: Path


def make_certificates(folder: Path, hosts: tuple[str, ...] = ()) -> MadeCertificates:
    """Makes an authority and a certificate for this machine and `hosts`, anew.

    Raises CommandError when `openssl` is missing or fails.
    """
    if shutil.which("openssl") is None:
        raise CommandError("--tls needs the command `openssl`, which is not on the PATH")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = MadeCertificates(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    ca_key, request = folder / "ca-key.pem", folder / "request.pem"
    ca_config = _config(folder / "ca.cnf", "pagewire test authority", ())
    config = _config(folder / "server.cnf", "pagewire test server", hosts)
    _openssl(
        *("req", "-x509", *_CURVE, "-keyout", ca_key, "-out", made.ca, "-days", DAYS),
        *("-config", ca_config, "-extensions", "authority"),
    )
    _openssl("req", *_CURVE, "-keyout", made.key, "-out", request, "-config", config)
    _openssl(
        *("x509", "-req", "-in", request, "-CA", made.ca, "-CAkey", ca_key, "-CAcreateserial"),
        *("-out", made.cert, "-days", DAYS, "-extfile", config, "-extensions", "server"),
    )
    for key in (ca_key, made.key):
        key.chmod(0o600)
    return made


def _config(path: Path, name: str, hosts: tuple[str, ...]) -> Path:
    names = dict.fromkeys(("localhost", socket.gethostname(), *hosts))
    alternatives = ["IP:127.0.0.1", "IP:::1", *map(_alternative, names)]
    path.write_text(_CONFIG.format(name=name, alternatives=", ".join(dict.fromkeys(alternatives))))
    return path


def _alternative(host: str) -> str:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return f"IP:{host}"
    return f"DNS:{host}"


def _openssl(*arguments: str | Path) -> None:
    words = ["openssl", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        problem = done.stderr.strip().splitlines()
        raise CommandError(f"`openssl {words[1]}` failed: {problem[-1] if problem else 'silently'}")
