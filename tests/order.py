"""In which order tests run, which share a process, and which the fast run leaves out."""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Fixtures that start services for many files; a file is with the first that it takes.
PRODUCTS = ("tiny_product", "product", "observed")

# Files whose tests share nothing and take seconds each; they fill the end of the run.
APART = ("e2e/test_dtypes.py",)

# Long files and products, most of them waits: they begin first of their folder, else the run ends
# with one process that computes them while the others have nothing left.
LONG = (
    "product", "deploy/images/test_replayed_images.py", "e2e/rolling/test_standby.py",
    "e2e/speculation/test_products.py", "e2e/test_worker_death.py",
    "scheduler_svc/standby/test_standby.py",
)  # fmt: skip

# One makes and removes network interfaces, at which a browser gives up its connections.
NETWORK = ("deploy/cluster", "e2e/page")

# They take longest: they begin with what computes, in all that is tested.
LONGEST = (*NETWORK, "tiny_product", "e2e/failures/test_supervised.py")

# Each file needs the same dozen libraries, of three seconds of a compiler each: at once, each
# process would compile all of them.
COMPILED = "kernels/cpu"

# Folders by what their tests cost. What is in none of them costs as much as the middle.
FOLDERS = (
    ("wire", "protos", "simulator", "scheduler_svc/core"),
    ("scheduler_svc", "gateway", "pagewire", "bench"),
    (".", "default_model"),
    ("kernels", "worker_svc", "gpu", "packaging"),
    ("deploy", "e2e"),
)
RANKS = {folder: rank for rank, folders in enumerate(FOLDERS) for folder in folders}
# What the fast run leaves out: folders, and files that walk at random, start many processes, tell
# long stories or import torch.
SLOW_FOLDERS = (
    "default_model", "deploy", "kernels", "worker_svc", "gpu", "packaging", "e2e",
    "bench", "clients", "gateway/edge", "gateway/structure", "pagewire/hub", "pagewire/launcher",
    "scheduler_svc/discovery", "scheduler_svc/journal", "scheduler_svc/standby", "simulator",
    "wire/tracing",
)  # fmt: skip
SLOW_FILES = (
    "test_api_table", "test_call_walks", "test_capacity", "test_chaos", "test_chat_terminal",
    "test_cli", "test_client", "test_cpu_vs_transformers", "test_default_model",
    "test_detection", "test_documented", "test_download", "test_drafter", "test_edges",
    "test_exact_walks", "test_files", "test_grants", "test_groups", "test_grpc",
    "test_half_characters", "test_header", "test_hypotheses", "test_langchain",
    "test_lost_connections", "test_machine",
    "test_metrics", "test_modules", "test_overload", "test_packaging", "test_planted_moves",
    "test_process", "test_random_walks", "test_replay", "test_resume", "test_same_text",
    "test_schema_walks", "test_shell", "test_slow_handshake", "test_slow_readers", "test_split",
    "test_template", "test_tokenizer", "test_up", "test_waves",
)  # fmt: skip


def rank(item: pytest.Item) -> tuple[int, int, bool]:
    """The key to sort by: the folder's rank, in it the file's place, and there slow tests last."""
    return *rank_of_file(item.path), "slow" in item.keywords


@cache
def rank_of_file(path: Path) -> tuple[int, int]:
    """The rank of the nearest folder that has one, and the file's place in it."""
    name = path.relative_to(TESTS)
    names = {str(name), str(name.parent), group_of(path, "")}
    if names.intersection(LONGEST):
        return RANKS["kernels"], 0
    folder = next(str(p) for p in name.parents if str(p) in RANKS)
    return RANKS[folder], 0 if names.intersection(LONG) else 2 if str(name) in APART else 1


def group_of(path: Path, nodeid: str) -> str:
    """The name of tests that run in one process: a product, a folder, a file or one test."""
    place = path.relative_to(TESTS)
    if str(place) in APART:
        return nodeid
    if str(place.parent) in NETWORK:
        return "network"
    if str(place.parent) == COMPILED:
        return COMPILED
    is_whole_path = place.parts[0] == "e2e"
    return (product_of(path.read_text()) if is_whole_path else "") or nodeid.partition("::")[0]


@cache
def product_of(source: str) -> str:
    """The product that a file's tests and fixtures take, and that it does not define itself."""
    functions = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    fixtures = [
        node
        for node in functions
        if any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    tests = [node for node in functions if node.name.startswith("test_")]
    taken = {argument.arg for node in (*fixtures, *tests) for argument in node.args.args}
    taken -= {node.name for node in fixtures}
    return next((name for name in PRODUCTS if name in taken), "")


def is_slow(path: Path) -> bool:
    """True if the fast run leaves out a folder or a file."""
    return path.stem in SLOW_FILES or str(path.relative_to(TESTS)) in SLOW_FOLDERS
