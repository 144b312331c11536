"""`python -m wire.identity new`: a new API key. `pagewire keys` runs it."""

import argparse
import sys
from collections.abc import Sequence

from wire.identity.keys import new_key
from wire.identity.roles import KEY_ROLES, Role


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the key, once, and its line for the file; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="pagewire keys", description="Makes keys for --api-keys.", allow_abbrev=False
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    new = commands.add_parser("new", help="Print a new key and its line.", allow_abbrev=False)
    add = new.add_argument
    add("--name", required=True, help="whose key it is; part of the key, and unique in the file")
    add("--tenant", required=True, help="whose requests they are")
    add(
        "--role",
        type=Role,
        choices=KEY_ROLES,
        action="append",
        required=True,
        metavar="{user,operator}",
        help="what the key may do; may be repeated",
    )
    options = parser.parse_args(arguments)
    try:
        key, entry = new_key(options.name, options.tenant, options.role)
    except ValueError as error:
        new.error(f"--{error}")
    sys.stderr.write("The key, which is shown this once and stored nowhere:\n")
    sys.stdout.write(f"{key}\n")
    sys.stderr.write("The line for the file of --api-keys:\n")
    sys.stdout.write(f"{entry.line()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
