"""The oracle of throughput: the same requests for every side, batches, padding, rates."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.compare import static_batches as bench
from bench.harness.workloads import WorkloadRequest
from tests.worker_svc.random_models import save_random_model

CONFIG = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
    "eos_token_id": 2,
}


def requests(*lengths: int) -> list[WorkloadRequest]:
    return [WorkloadRequest([20 + i] * (i + 3), length) for i, length in enumerate(lengths)]


def test_the_workload_is_the_seeds_and_within_its_bounds() -> None:
    drawn = bench.workload(0, 64, 1000)
    assert drawn == bench.workload(0, 64, 1000) != bench.workload(1, 64, 1000)
    assert all(10 <= one.max_tokens <= 200 and 16 <= len(one.prompt) <= 64 for one in drawn)
    assert all(17 <= token_id < 1000 for one in drawn for token_id in one.prompt)


def test_continuous_batching_needs_two_thirds_of_the_row_steps_of_static_batches() -> None:
    """What the measured ratio comes from, without a clock: rows that compute, wanted or not."""
    drawn = bench.workload(0, 64, 1000)
    wanted = sum(one.max_tokens for one in drawn)
    computed = sum(
        one.max_tokens for part in bench.batches(drawn, 16) for one in bench.padded(part)
    )
    assert computed > 1.5 * wanted


def test_batches_keep_the_order_and_lose_nothing() -> None:
    parts = list(bench.batches(requests(5, 9, 2, 7, 1), 2))
    assert [[one.max_tokens for one in part] for part in parts] == [[5, 9], [2, 7], [1]]
    assert [one.max_tokens for one in bench.padded(parts[0])] == [9, 9]
    assert [one.prompt for one in bench.padded(parts[0])] == [one.prompt for one in parts[0]]


def test_generate_gives_a_padded_batch_what_each_prompt_gets_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_random_model(tmp_path, (LlamaConfig, LlamaForCausalLM), CONFIG)
    theirs = bench.TransformersSide(tmp_path, 4, "float32")
    batch = requests(4, 12, 7)
    together = theirs.generate(batch)
    assert [len(output) for output in together] == [4, 12, 7]
    assert together == [theirs.generate([one])[0] for one in batch]


def test_rates_count_what_was_asked_for_and_compare_with_the_static_batcher() -> None:
    measured = {"continuous": [2.0, 1.0, 9.0], bench.STATIC: [4.0]}
    continuous, static = bench.rates(measured, requests(10, 30))
    assert (continuous.requests_per_s, continuous.tokens_per_s, continuous.ratio) == (
        1.0,
        20.0,
        2.0,
    )
    assert (static.requests_per_s, static.tokens_per_s, static.ratio) == (0.5, 10.0, 1.0)
    header, first, second = bench.table([continuous, static]).splitlines()
    assert len({len(header), len(first), len(second)}) == 1
    assert first.endswith(" 2.00x") and second.endswith(" 1.00x")


@pytest.mark.slow
def test_every_side_serves_a_short_workload(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "OUTPUT_TOKENS", (2, 8))
    options = ["--shape", "tiny", "--requests", "6", "--batch", "2", "--repeat", "1"]
    assert bench.main([*options, "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:16].strip() for line in lines[1:]] == list(bench.SIDES)
