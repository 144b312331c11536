"""`python -m pagewire.hub ORG/NAME[@revision]`: downloads a model, with its progress on stderr.

The only line on stdout is the model's folder or, with exit status 1, why there is none.
"""

import argparse
import sys
from collections.abc import Sequence

from pagewire.hub import names
from pagewire.hub.download import ModelUnavailable, download
from pagewire.settings import home


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    home.settle()
    parser = argparse.ArgumentParser(
        prog="python -m pagewire.hub",
        description="Downloads a model into the cache of huggingface_hub, and prints its folder.",
    )
    parser.add_argument("name", metavar="ORG/NAME[@REVISION]")
    parser.add_argument("--without-weights", action="store_true", help="what a gateway needs")
    options = parser.parse_args(arguments)
    name = names.parse(options.name)
    if name is None:
        parser.error(f"{options.name!r} is not ORG/NAME or ORG/NAME@REVISION")
    try:
        sys.stdout.write(f"{download(name, with_weights=not options.without_weights)}\n")
    except ModelUnavailable as error:
        sys.stdout.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
