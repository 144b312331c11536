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
    ("scheduler_svc", "gateway", "pagewire", "bench"),
    (".", "default_model"),
    ("kernels", "worker_svc"),
    ("e2e",),
)
RANKS = {folder: rank for rank, folders in enumerate(FOLDERS) for folder in folders}
# What the fast run leaves out: a folder, or a file that walks at random or works on a real model.
SLOW_FOLDERS = ("default_model", "kernels", "worker_svc", "e2e")
SLOW_FILES = (
    "test_chaos", "test_files", "test_machine", "test_planted_moves", "test_random_walks",
    "test_replay", "test_schema_walks", "test_split",
)  # fmt: skip


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
    if folder in SLOW_FOLDERS:
        return f"in tests/{folder}"
    return "long walks" if item.path.stem in SLOW_FILES else ""


def count(items: Iterable[pytest.Item]) -> dict[str, int]:
    """How many tests are left out, by reason."""
    return dict(Counter(map(reason_to_leave_out, items)))
