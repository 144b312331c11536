"""In which order tests run, which share a process, and which the fast run leaves out."""

from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PRODUCTS = ("tiny_product", "product")  # fixtures that start services; a file is with the first

# One makes and removes network interfaces, at which a browser gives up its connections.
NETWORK = ("deploy/cluster", "e2e/page")

# Folders by what their tests cost. What is in none of them costs as much as the middle.
FOLDERS = (
    ("wire", "protos", "simulator", "scheduler_svc/core"),
    ("scheduler_svc", "gateway", "pagewire", "bench"),
    (".", "default_model"),
    ("kernels", "worker_svc", "gpu", "packaging"),
    ("deploy", "e2e"),
)
RANKS = {folder: rank for rank, folders in enumerate(FOLDERS) for folder in folders}
# What the fast run leaves out: folders, and files that walk at random, start many processes or
# import torch.
SLOW_FOLDERS = (
    "default_model", "deploy", "kernels", "worker_svc", "gpu", "packaging", "e2e",
    "bench", "clients", "gateway/edge", "gateway/structure", "pagewire/hub", "pagewire/launcher",
    "scheduler_svc/discovery", "scheduler_svc/journal", "simulator", "wire/tracing",
)  # fmt: skip
SLOW_FILES = (
    "test_api_table", "test_call_walks", "test_capacity", "test_chaos", "test_cli", "test_client",
    "test_cpu_vs_transformers", "test_default_model", "test_detection", "test_documented",
    "test_download", "test_edges", "test_files", "test_grants", "test_groups", "test_grpc",
    "test_hypotheses", "test_langchain", "test_machine", "test_metrics", "test_modules",
    "test_overload", "test_packaging", "test_planted_moves", "test_process", "test_random_walks",
    "test_replay", "test_resume", "test_same_text", "test_schema_walks", "test_shell",
    "test_slow_handshake", "test_slow_readers", "test_split", "test_template", "test_tokenizer",
    "test_up",
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
    """What the tests of a file share with others, a product or the network; empty if nothing."""
    if str(path.parent.relative_to(TESTS)) in NETWORK:
        return "network"
    source = path.read_text() if path.is_relative_to(TESTS / "e2e") else ""
    return next((name for name in PRODUCTS if f"{name}: Product" in source), "")


def is_slow(path: Path) -> bool:
    """Whether the fast run leaves out a folder or a file."""
    return path.stem in SLOW_FILES or str(path.relative_to(TESTS)) in SLOW_FOLDERS
