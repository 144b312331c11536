"""In which order tests run, which share a process, and which the fast run leaves out."""

from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PRODUCTS = ("tiny_product", "product")  # fixtures that start services; a file is with the first

# Folders by what their tests cost. What is in none of them costs as much as the middle.
FOLDERS = (
    ("rpc", "protos", "simulator", "scheduler_svc/core"),
    ("scheduler_svc", "gateway", "pagewire", "default_model", "bench"),
    (".",),
    ("kernels", "worker_svc"),
    ("e2e",),
)
RANKS = {folder: rank for rank, folders in enumerate(FOLDERS) for folder in folders}
SLOW_FOLDERS = ("kernels", "worker_svc", "e2e")


def folder_of(item: pytest.Item) -> str:
    """The nearest folder with a rank."""
    path = item.path.parent.relative_to(TESTS)
    return next(str(p) for p in (path, *path.parents) if str(p) in RANKS)


def rank(item: pytest.Item) -> tuple[int, bool]:
    """What is sorted by: the folder's rank, and in it slow tests last."""
    return RANKS[folder_of(item)], "slow" in item.keywords


@cache
def product_of(path: Path) -> str:
    """The product that the tests of a file share with others; empty if they share none."""
    source = path.read_text() if path.is_relative_to(TESTS / "e2e") else ""
    return next((name for name in PRODUCTS if f"{name}: Product" in source), "")


def reason_to_leave_out(item: pytest.Item) -> str:
    """Why the fast run does without it; empty if it does not."""
    if "slow" in item.keywords:
        return "marked slow"
    folder = folder_of(item)
    return f"in tests/{folder}" if folder in SLOW_FOLDERS else ""


def count(items: Iterable[pytest.Item]) -> dict[str, int]:
    """How many tests are left out, by reason."""
    return dict(Counter(map(reason_to_leave_out, items)))
