"""The environment variables of options: PAGEWIRE_<OPTION>, and PAGEWIRE_<COMMAND>_<OPTION>.

The longer name is for one command and goes before the shorter one. An empty variable is not set.
"""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from pagewire.settings.known import OPTIONS, VARIABLES

PREFIX = "PAGEWIRE_"
# What Kubernetes sets for a service that is named pagewire: PAGEWIRE_PORT=tcp://10.0.0.1:8000.
_LINK = re.compile(r"(tcp|udp|sctp)://")


def variable(option: str, command: str = "") -> str:
    """The name of an option's variable, of one command alone or of all: api-key, PAGEWIRE_API_KEY.

    `option` is the long name without dashes.
    """
    name = option.upper().replace("-", "_")
    return f"{PREFIX}{command.upper()}_{name}" if command else PREFIX + name


def found(option: str, command: str, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The variable that sets an option of a command, and its text; None where none does."""
    for name in (variable(option, command), variable(option)):
        text = environ.get(name, "")
        if text and not _LINK.match(text):
            return name, text
    return None


def strangers(environ: Mapping[str, str]) -> Iterator[str]:
    """A line for each PAGEWIRE_ variable that sets no option of any command."""
    known = {variable(option) for options in OPTIONS.values() for option in options}
    known |= {
        variable(option, command) for command, options in OPTIONS.items() for option in options
    }
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        if _LINK.match(environ[name]):
            yield (
                f"{name} is ignored: it looks like a service link of Kubernetes "
                "(enableServiceLinks: false leaves these out)"
            )
        elif name not in known and name not in VARIABLES:
            near = get_close_matches(name, [*known, *VARIABLES], n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            yield f"{name} is ignored: no option has this variable{hint}"
