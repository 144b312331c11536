"""The libraries that an extra of this package brings, and those of them that are missing."""

import re
from collections.abc import Iterator
from importlib import metadata

from pagewire.cli.options import CommandError

DISTRIBUTION = "pagewire"
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_EXTRA = re.compile(r"""extra == ['"]([^'"]+)['"]""")


def require(*extras: str) -> None:
    """Raises CommandError with the names of libraries that are missing, and how to install them.

    Without the package's own metadata, as in a plain copy of the tree, nothing is checked.
    """
    missing = sorted(name for name in _libraries(extras) if not _is_installed(name))
    if missing:
        wanted = "serve" if len(extras) > 1 else extras[0]
        raise CommandError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: "
            f'pip install "{DISTRIBUTION}[{wanted}]"'
        )


def _libraries(extras: tuple[str, ...]) -> set[str]:
    return {name for extra, name in _requirements() if extra in extras}


def _requirements() -> Iterator[tuple[str, str]]:
    """Pairs of an extra and a distribution that it needs."""
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return
    for line in required:
        name, extra = _NAME.match(line), _EXTRA.search(line)
        if name and extra and name[0] != DISTRIBUTION:
            yield extra[1], name[0]


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
