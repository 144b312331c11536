"""A home for processes of users that have none, such as a container's user id without a name.

Caches of the libraries and of our own lie in the home. Without one they lie in a folder of the
user's own among the temporary files.
"""

import os
import pwd
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

HOME = "HOME"
LOGIN = "LOGNAME"  # what getpass asks first, before the list of users


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's home, or the private folder if there is none that a cache fits into.

    Raises OSError if not even that can be made.
    """
    known = _known(environ)
    return known if known is not None and _has_room(known) else _private()


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """$PAGEWIRE_CACHE, else pagewire in $XDG_CACHE_HOME, else in .cache of the home."""
    if named := environ.get("PAGEWIRE_CACHE"):
        return Path(named)
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else home(environ) / ".cache") / "pagewire"


def settle(environ: MutableMapping[str, str] = os.environ) -> None:
    """Gives a process without a home the private one, and a name; for a process of our own.

    Called before libraries are imported that look for their caches.
    """
    known = _known(environ)
    if known is None or not _has_room(known):
        environ[HOME] = str(_private())
    if not _has_name():
        environ.setdefault(LOGIN, f"uid{os.getuid()}")


def _known(environ: Mapping[str, str]) -> Path | None:
    if named := environ.get(HOME):
        return Path(named)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def _has_name() -> bool:
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return True


def _has_room(path: Path) -> bool:
    """True if the folder, or its .cache, can be written or made."""
    return path.is_absolute() and any(map(_can_write, (path / ".cache", path)))


def _can_write(path: Path) -> bool:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


def _private() -> Path:
    """A folder among the temporary files that is this user's alone, the same one at each call."""
    folder = Path(tempfile.gettempdir()) / f"pagewire-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not this user's own: set HOME or XDG_CACHE_HOME")
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder
