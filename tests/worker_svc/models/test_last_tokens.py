"""Last layer computed for the last tokens only: their hidden states do not change."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.gpu.test_cuda_runner import SHAPE
from tests.worker_svc.random_models import save_random_model
from worker_svc.attention.batch import AttentionBatch, LastTokens
from worker_svc.attention.kv_cache import KVCache
from worker_svc.models import config as model_config
from worker_svc.models.decoder import Decoder
from worker_svc.models.fused import FusedDecoder
from worker_svc.models.weights import load_weights
from worker_svc.runner.inputs import last_tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE = 16
# Three sequences: numbers of tokens before this step and in it. The second prefills a chunk.
COMPUTED, SCHEDULED = (20, 0, 5), (1, 7, 18)


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> FusedDecoder:
    """Fused layers; on a CPU Triton interprets the kernels."""
    folder: Path = tmp_path_factory.mktemp("models") / "qwen3"
    save_random_model(folder, (Qwen3Config, Qwen3ForCausalLM), SHAPE)
    config = model_config.load(folder)
    model = Decoder(config, torch.float32, DEVICE, 64)
    load_weights(folder, dict(model.destinations()), frozenset(), model.sharding.share)
    return model._fuse()


@pytest.fixture(scope="module")
def cache(fused: FusedDecoder) -> KVCache:
    torch.manual_seed(1)
    cache = KVCache(2, 8, BLOCK_SIZE, 2, 16, torch.float32, DEVICE)
    for layer in range(2):
        for part in cache.layer(layer):
            part.normal_()
    return cache


def batch() -> tuple[Tensor, Tensor, AttentionBatch]:
    """Token ids, positions and batch of the step; sequence i has blocks 2i + 1 and 2i + 2."""
    with DEVICE:
        positions = torch.cat(
            [torch.arange(a, a + n) for a, n in zip(COMPUTED, SCHEDULED, strict=True)]
        )
        sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(SCHEDULED))
        ends = torch.tensor(COMPUTED) + torch.tensor(SCHEDULED)
        attention = AttentionBatch(
            slot_mapping=(2 * sequence + 1) * BLOCK_SIZE + positions,
            block_tables=torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32),
            context_lens=ends.int(),
            cu_seqlens_q=torch.tensor([0, 1, 8, 26], dtype=torch.int32),
            max_seqlen_q=max(SCHEDULED),
            max_context_len=int(ends.max()),
        )
        return 3 + torch.arange(26) % 50, positions, attention


def run(fused: FusedDecoder, cache: KVCache, last: LastTokens | None) -> tuple[Tensor, Tensor]:
    """Hidden states, and the KV cache after the step."""
    mine = KVCache(2, 8, BLOCK_SIZE, 2, 16, torch.float32, DEVICE)
    for layer in range(2):
        for to, part in zip(mine.layer(layer), cache.layer(layer), strict=True):
            to.copy_(part)
    token_ids, positions, attention = batch()
    with torch.inference_mode():
        hidden = fused.forward(token_ids, positions, mine, attention, last)
    return hidden, torch.stack([torch.stack(mine.layer(layer)) for layer in range(2)])


@pytest.fixture(scope="module")
def whole(fused: FusedDecoder, cache: KVCache) -> tuple[Tensor, Tensor]:
    """Hidden states of all tokens, and the KV cache after the step."""
    return run(fused, cache, None)


def wanted(*sequences: int) -> LastTokens:
    _, _, attention = batch()
    which = torch.tensor(sequences, dtype=torch.int64, device=DEVICE)
    rows = attention.cu_seqlens_q.long()[1:][which] - 1
    return last_tokens(rows, which, attention)


@pytest.mark.parametrize("sequences", [(0, 2), (0, 1, 2), (2,)])
def test_the_last_tokens_come_out_as_they_do_among_all(
    sequences: tuple[int, ...],
    fused: FusedDecoder,
    cache: KVCache,
    whole: tuple[Tensor, Tensor],
) -> None:
    last = wanted(*sequences)
    hidden, keys_and_values = whole
    alone, mine = run(fused, cache, last)
    torch.testing.assert_close(alone, hidden[last.rows], rtol=1e-4, atol=1e-5)
    assert torch.equal(mine, keys_and_values)


def test_where_no_logits_are_wanted_the_cache_is_filled_all_the_same(
    fused: FusedDecoder, cache: KVCache, whole: tuple[Tensor, Tensor]
) -> None:
    _, keys_and_values = whole
    nothing, mine = run(fused, cache, wanted())
    assert nothing.shape == (0, 64)
    assert torch.equal(mine, keys_and_values)
