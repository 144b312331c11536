"""The rooms of the gateway, as a reader finds them: few, and with few ways between them."""

import ast
from pathlib import Path

from tests.test_repository import ROOT

GATEWAY = ROOT / "gateway"
MAX_ROOMS, MAX_ARROWS = 16, 80


def test_rooms_and_the_arrows_between_them_are_few() -> None:
    rooms = {path.parent.name for path in GATEWAY.glob("*/__init__.py")}
    assert len(rooms) <= MAX_ROOMS, sorted(rooms)
    arrows = {
        (own, other)
        for own in rooms
        for path in (GATEWAY / own).rglob("*.py")
        for other in imported(path) & rooms
        if own != other
    }
    assert len(arrows) <= MAX_ARROWS, sorted(arrows)
    assert not {(other, own) for own, other in arrows} & arrows


def test_every_file_is_in_a_room() -> None:
    assert {path.name for path in GATEWAY.glob("*.py")} == {"__init__.py", "__main__.py"}


def imported(path: Path) -> set[str]:
    """The rooms of the gateway that a file imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("gateway.")}
    return found
