"""Settings made before any test module is imported, and the order in which tests run."""

import atexit
import fcntl
import gc
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests import order
from tests.pace import pace, patience

# Triton reads this at its first import, which transformers also triggers: without a GPU its kernels
# are interpreted, on CPU tensors.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Several processes of tests share the cores; torch reads this when it is first imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Connections are broken on purpose all the time; gRPC would say so between the dots.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# The gateways of tests would require it, and no test knows it.
os.environ.pop("PAGEWIRE_API_KEY", None)

# Containers often set it, and then each of hundreds of processes compiles all that it imports. The
# Makefile takes it away as well, before anything is imported.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts this in the background has SIGINT ignored, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Until all is collected nothing is garbage: looking for it takes a fifth of the collection.
gc.disable()
atexit.register(gc.unfreeze)  # a library that has classes left at the end says so

pace()  # measured here, so that every process of the run knows the same
# A test that hangs is a failure with a name: 600 s on a usual machine, more on a slower one.
os.environ.setdefault("PYTEST_TIMEOUT", f"{patience(150):.0f}")

# An example may take as long as it takes: by default one of 200 ms is a failure.
settings.register_profile("any pace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any pace")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only the first minute's worth of tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --fast, what is left out is not even imported."""
    return True if config.getoption("--fast") and order.is_slow(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """In a new checkout one process collects before the others do.

    The first import of a module compiles it. All processes import the same modules at the same
    time, and would compile each of them.
    """
    config, cache = session.config, getattr(session.config, "cache", None)
    if cache is None or "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    key = f"collected/{'fast' if config.getoption('--fast') else 'all'}"
    # Of what, and with which environment: the file is new in a new one.
    what = [*config.args, os.stat(pytest.__file__).st_ctime_ns]
    if cache.get(key, None) == what:
        return (yield)
    with (cache.mkdir("collecting") / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if cache.get(key, None) != what:
            outcome = yield
            cache.set(key, what)
            return outcome
    return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cheap tests first."""
    if config.getoption("--fast"):
        items[:] = [item for item in items if "slow" not in item.keywords]
    items.sort(key=order.rank)
    _skip_without_cuda([item for item in items if item.get_closest_marker("gpu")])


def _skip_without_cuda(items: list[pytest.Item]) -> None:
    if not items:
        return
    import torch  # noqa: PLC0415 - those who need it have imported it

    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """From here on garbage is looked for, though not in all that was imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test draws the same numbers in every run, whatever ran before it in its process."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


class ByFileOrProduct(LoadScopeScheduling):
    """Tests of one file run in one process, and so do all tests that share a product."""

    def _split_scope(self, nodeid: str) -> str:
        return order.group_of(self.config.rootpath / nodeid.partition("::")[0], nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """With `-n auto`, more processes than cores: many tests wait for what they killed.

    Those of --fast take 45 s with two more on two cores, 54 with three, as each collects. Where
    something else keeps a core busy, all take 857 s with three and 937 s with two, by their share.
    """
    return (os.cpu_count() or 1) + (2 if config.getoption("--fast") else 3)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return ByFileOrProduct(config, log)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.getoption("--fast"):
        left_out = ", ".join([*order.SLOW_FOLDERS, *order.SLOW_FILES])
        terminalreporter.write_line(f"left out by --fast: {left_out}, and what is marked slow")


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs program by program, also those that have nothing to do.

    One row still has more of them than the most splits, five rows have fewer.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        monkeypatch.setattr("kernels.attention.decode_attention._LEADING_PROGRAMS", 128)
        monkeypatch.setattr("kernels.attention.latent_attention._PROGRAMS", 16)


@pytest.fixture
def any_step_is_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grants are made however long steps take: on a busy machine none is short enough."""
    monkeypatch.setattr("scheduler_svc.worker.pace._GRANT_S", 1e9)
