"""A cache too small for its prompts, host memory for what it drops, a disk for what both lose."""

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import pagewire
from pagewire.admin import Admin
from tests.e2e.conftest import Product
from tests.e2e.test_host_tier import counted, told

NUM_PROMPTS = 64
GREEDY = pagewire.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
# 8 blocks of 16 tokens on the device: one prompt.
SMALL = ("--threads", "1", "--max-model-len", "128", "--num-kv-blocks", "9")


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A running product whose worker has a disk tier, and the folder of its files."""

    product: Product
    path: Path

    @property
    def files(self) -> list[Path]:
        return sorted(self.path.glob("*/*.kv"))

    def worker_gauge(self, name: str) -> float:
        url = f"http://127.0.0.1:{self.product.worker_metrics_port}/metrics"
        found = text_string_to_metric_families(httpx.get(url).text)
        full = f"pagewire_worker_disk_tier_{name}"
        return sum(s.value for family in found for s in family.samples if s.name == full)

    def restart_worker(self) -> None:
        self.product.kill_worker()
        self.product.start_worker()


@pytest.fixture(scope="module")
def tiered(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnDisk]:
    disk = tmp_path_factory.mktemp("disk") / "made at start"
    tiers = ("--host-tier-gib", "0.02", "--disk-tier", f"{disk}:0.1")
    with Product(tiny_model, tmp_path_factory.mktemp("logs"), (*SMALL, *tiers)) as running:
        running.start()
        yield OnDisk(running, disk)


def prompt_of(number: int) -> str:
    return f"{number} ships went to sea. " + "The wind was fair and the night was long. " * 7


def ask_all(
    product: Product, num_prompts: int = NUM_PROMPTS, salt: str = ""
) -> list[pagewire.Completion]:
    with product.sdk() as sdk:
        return [
            sdk.generate(prompt_of(number), GREEDY, cache_salt=salt)
            for number in range(num_prompts)
        ]


@pytest.fixture(scope="module")
def cold(tiered: OnDisk) -> list[pagewire.Completion]:
    return ask_all(tiered.product)


def test_64_prompts_come_from_host_memory_and_after_a_restart_from_the_disk(
    tiered: OnDisk, cold: list[pagewire.Completion]
) -> None:
    """Token for token and score for score; nothing for another salt."""
    product = tiered.product
    assert sum(one.usage.cached_tokens for one in cold) == 0
    warm = ask_all(product)
    assert told(warm) == told(cold)
    assert counted(product, "fetched_blocks_total") > 100
    tiered.restart_worker()
    again = ask_all(product)
    assert told(again) == told(cold)
    # A copy that a slow machine makes late, or that takes longer than computing, is computed.
    assert counted(product, "fetched_blocks_total", "disk_tier_") >= 8
    assert sum(one.usage.cached_tokens > 0 for one in again) >= 4
    assert tiered.worker_gauge("blocks") == len(tiered.files) > 100
    assert tiered.worker_gauge("write_off") == 0
    other = ask_all(product, salt="another")
    assert sum(one.usage.cached_tokens for one in other) == 0


def test_another_scheduler_and_another_worker_find_what_these_left(
    tiered: OnDisk, cold: list[pagewire.Completion]
) -> None:
    tiered.product.stop()
    tiered.product.start()
    again = ask_all(tiered.product)
    assert told(again) == told(cold)
    assert counted(tiered.product, "fetched_blocks_total", "disk_tier_") >= 8


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _exchange(path: Path) -> None:
    """Each file has the bytes of another block."""
    others = sorted(path.parent.glob("*.kv"))
    path.write_bytes(others[others.index(path) - 1].read_bytes())


@pytest.mark.parametrize("damage", [_flip, _cut, _exchange, Path.unlink])
def test_files_that_are_damaged_while_it_runs_are_computed(
    tiered: OnDisk, cold: list[pagewire.Completion], damage: Callable[[Path], None]
) -> None:
    ask_all(tiered.product, 16)  # so that there are some
    tiered.restart_worker()
    ask_all(tiered.product, 1)  # it has told what is there
    for path in tiered.files:
        damage(path)
    assert told(ask_all(tiered.product, 16)) == told(cold[:16])


def test_a_folder_that_is_removed_while_it_runs_is_made_again(
    tiered: OnDisk, cold: list[pagewire.Completion]
) -> None:
    shutil.rmtree(tiered.path)
    for _ in range(2):
        assert told(ask_all(tiered.product, 16)) == told(cold[:16])
    assert tiered.files and tiered.worker_gauge("write_off") == 0


def test_two_workers_share_a_folder(
    tiered: OnDisk, cold: list[pagewire.Completion], tmp_path: Path
) -> None:
    options = tiered.product.worker_options
    with Product(tiered.product.model, tmp_path, options) as other:
        other.start()
        with ThreadPoolExecutor() as threads:
            both = list(threads.map(lambda one: ask_all(one, 32), (tiered.product, other)))
    assert [told(one) for one in both] == [told(cold[:32])] * 2


def test_a_reset_removes_the_files(tiered: OnDisk, cold: list[pagewire.Completion]) -> None:
    with Admin(f"127.0.0.1:{tiered.product.scheduler_port}") as admin:
        admin.reset_prefix_cache()
    assert told(ask_all(tiered.product, 4)) == told(cold[:4])
    assert len(tiered.files) <= 4 * 5


def test_a_path_that_cannot_be_written_is_no_reason_not_to_serve(
    tiny_model: Path, tmp_path: Path, cold: list[pagewire.Completion]
) -> None:
    (tmp_path / "a file").write_bytes(b"")
    disk = "--disk-tier", f"{tmp_path}/a file:1"
    with Product(tiny_model, tmp_path, (*SMALL, *disk)) as product:
        product.start()
        for _ in range(2):
            assert told(ask_all(product, 8)) == told(cold[:8])
        assert OnDisk(product, tmp_path).worker_gauge("write_off") == 1
        assert product.read_log("worker_svc").count("not written any more") == 1
