"""`python -m default_model`: progress on stderr, the model's path as the only line on stdout.

How far it is shows on terminals alone, in one line that is rewritten.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from default_model.convert import WEIGHTS
from default_model.folder import ensure, ensure_file
from default_model.source import DefaultModelError
from pagewire._terminal import StatusLine

PREFIX = "[default model] "


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m default_model",
        description="Makes the default model's folder unless it is cached, and prints its path.",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="cache (default: $PAGEWIRE_CACHE, $XDG_CACHE_HOME/pagewire or ~/.cache/pagewire)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="hash the cached files instead of believing sizes"
    )
    parser.add_argument(
        "--file", action="store_true", help="print the path of the GGUF file and make no folder"
    )
    options = parser.parse_args(arguments)
    line = StatusLine(sys.stderr)

    def tell(text: str) -> None:
        if text.startswith(WEIGHTS):
            line.show(f"{PREFIX}{text}")
        else:
            line.clear()
            sys.stderr.write(f"{PREFIX}{text}\n")
            sys.stderr.flush()

    try:
        if options.file:
            found = ensure_file(options.cache, tell)
        else:
            found = ensure(options.cache, tell, verify=options.verify)
    except (DefaultModelError, OSError) as error:
        tell(f"error: {error}")
        return 1
    sys.stdout.write(f"{found}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
