"""A cache too small for the sessions that share it, and host memory for what it drops."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import pagewire
from tests.byte_relay import ByteRelay
from tests.e2e.conftest import Product
from tests.pace import patience

NUM_SESSIONS = 10
GREEDY = pagewire.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def tiered(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    # 59 blocks of 16 tokens: two of the sessions below. The tier has room for all of them.
    small = ("--threads", "1", "--max-model-len", "768", "--num-kv-blocks", "60")
    tier = ("--host-tier-gib", "0.1")
    with Product(tiny_model, tmp_path_factory.mktemp("logs"), (*small, *tier)) as running:
        running.start()
        yield running


@pytest.fixture(scope="module")
def sdk(tiered: Product) -> Iterator[pagewire.Client]:
    with tiered.sdk() as client:
        yield client


def prompt_of(session: int) -> str:
    return f"{session} ships went to sea. " + "The wind was fair and the night was long. " * 30


def ask_all(sdk: pagewire.Client) -> list[pagewire.Completion]:
    return [sdk.generate(prompt_of(session), GREEDY) for session in range(NUM_SESSIONS)]


def told(completions: list[pagewire.Completion]) -> list[object]:
    return [(one.text, one.token_ids, one.logprobs) for one in completions]


def counted(product: Product, name: str, prefix: str = "tier_") -> float:
    url = f"http://127.0.0.1:{product.scheduler_metrics_port}/metrics"
    found = text_string_to_metric_families(httpx.get(url, timeout=patience(30)).text)
    full = f"pagewire_scheduler_{prefix}{name}"
    return sum(s.value for family in found for s in family.samples if s.name == full)


def test_what_comes_from_the_tier_is_what_was_computed(
    tiered: Product, sdk: pagewire.Client
) -> None:
    """Token for token and score for score, also after the worker and its memory were lost."""
    cold = ask_all(sdk)
    assert sum(one.usage.cached_tokens for one in cold) == 0
    warm = ask_all(sdk)
    assert told(warm) == told(cold)
    # A copy that a slow machine makes late is computed instead, so not each need be cached.
    assert sum(one.usage.cached_tokens > 200 for one in warm) > NUM_SESSIONS // 2
    assert counted(tiered, "fetched_blocks_total") > 50
    assert counted(tiered, "stored_blocks_total") > 50
    tiered.kill_worker()
    tiered.start_worker()
    again = ask_all(sdk)
    assert told(again) == told(cold)
    assert sum(one.usage.cached_tokens for one in again) == 0, "the memory was another process's"
    assert told(ask_all(sdk)) == told(cold)


async def test_a_worker_that_lives_keeps_what_its_tier_holds_when_its_stream_is_lost(
    tiny_model: Path, tmp_path: Path
) -> None:
    options = ("--threads", "1", "--max-model-len", "768", "--num-kv-blocks", "60")
    product = Product(tiny_model, tmp_path, (*options, "--host-tier-gib", "0.1"))
    with product:
        await asyncio.to_thread(product.start_worker)
        async with ByteRelay(product.worker_port) as relay:
            await asyncio.to_thread(product.start_scheduler, worker_port=relay.port)
            await asyncio.to_thread(product.start_gateway)
            await asyncio.to_thread(product.wait_until_ready)
            target = f"127.0.0.1:{product.grpc_port}"
            with pagewire.Client(target, timeout_s=patience(240)) as sdk:
                cold = await asyncio.to_thread(ask_all, sdk)
                relay.reset()
                again = await asyncio.to_thread(ask_all, sdk)
            losses = await asyncio.to_thread(counted, product, "worker_losses_total", prefix="")
    assert losses >= 1
    assert told(again) == told(cold)
    assert sum(one.usage.cached_tokens > 200 for one in again) > NUM_SESSIONS // 2
