"""Installed versions of flash-attn on a GPU, by the tests of the Triton kernels."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kernels.attention_kind import AttentionKind
from tests.gpu.test_cuda_runner import CONFIG, SHAPE, generate, make_prompt
from tests.pairs import pairwise
from tests.worker_svc.paged_batches import PagedBatch, assert_close
from worker_svc.attention import flash_attn
from worker_svc.attention.batch import HeadLayout
from worker_svc.attention.call import AttentionCall
from worker_svc.attention.flash_attn import FlashAttention, Setup
from worker_svc.attention.layer_kv import LayerKv
from worker_svc.startup import startup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # libraries may warn
]

CUDA = torch.device("cuda")
HEADS = [HeadLayout(16, 8, 128), HeadLayout(28, 4, 128), HeadLayout(32, 8, 64)]
BLOCK_SIZES = [16, 128, 256]
PROMPTS = {  # (context, queries) of each sequence
    "prompt": [(4096, 4096)],
    "prompts": [(512, 512)] * 16,
    "mixed": [(3000, 700)] * 3 + [(900, 1)] * 60,
    "chunks": [(90, 17), (160, 64), (65, 2), (129, 129), (1, 1)],
    "padding and idle": [(0, 1), (40, 0), (40, 8), (0, 0)],
}
DECODES = [[1], [2500], [1000, 0, 1, 16] * 4, [640] * 40, [9000] + [33] * 255]


def case_id(value: object) -> str:
    return f"batch-{len(value)}" if isinstance(value, list) else str(value)


@pytest.fixture(params=(4, 3, 2), ids=lambda version: f"flash-attn-{version}")
def version(request: pytest.FixtureRequest) -> int:
    return request.param


def backend(version: int, heads: HeadLayout, block_size: int) -> FlashAttention:
    """The backend of a version, or skips with the reason why it is unavailable."""
    capability = torch.cuda.get_device_capability()
    found = flash_attn.find(Setup(heads.head_dim, torch.bfloat16, block_size, capability))
    for candidate in found.backends:
        if candidate.version == version:
            return candidate
    pytest.skip(next(text for text in found.refusals if f"flash-attn {version}:" in text))


def batch(sequences: list[tuple[int, int]], heads: HeadLayout, block_size: int) -> PagedBatch:
    return PagedBatch.make(sequences, heads, block_size, torch.bfloat16, CUDA)


@pytest.mark.parametrize(
    ("heads", "block_size", "name"), pairwise(HEADS, BLOCK_SIZES, list(PROMPTS)), ids=str
)
def test_prompts_and_chunks(version: int, heads: HeadLayout, block_size: int, name: str) -> None:
    attends, kind = backend(version, heads, block_size), AttentionKind(heads.scale)
    made = batch(PROMPTS[name], heads, block_size)
    out = attends.prefill(made.call(kind))
    assert_close(out, made.expected(kind))


@pytest.mark.parametrize(
    ("heads", "block_size", "contexts"), pairwise(HEADS, BLOCK_SIZES, DECODES), ids=case_id
)
def test_decode_steps(
    version: int, heads: HeadLayout, block_size: int, contexts: list[int]
) -> None:
    attends, kind = backend(version, heads, block_size), AttentionKind(heads.scale)
    made = batch([(context, 1) for context in contexts], heads, block_size)
    out = attends.decode(made.call(kind))
    assert_close(out, made.expected(kind))


def test_a_captured_graph_follows_growing_contexts(version: int) -> None:
    heads = HEADS[0]
    attends, kind = backend(version, heads, 256), AttentionKind(heads.scale)
    made = batch([(700, 1), (90, 1), (1, 1)], heads, 256)
    lens = made.batch.context_lens
    attends.decode(made.call(kind))
    lens.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attends.decode(made.call(kind))
    for contexts in ([1, 0, 0], [33, 90, 1], [700, 64, 0]):
        lens.copy_(torch.tensor(contexts, dtype=torch.int32))
        graph.replay()
        assert_close(out, made.expected(kind))


def test_the_cache_is_read_where_it_lies(version: int) -> None:
    """A cache with unusual strides, of which a copy would take a gibibyte."""
    heads = HEADS[0]
    attends, kind = backend(version, heads, 256), AttentionKind(heads.scale)
    small = batch([(70, 70)], heads, 256)
    far = 2**31 // (256 * 2 * 8 * 128) + 8  # blocks; their offsets exceed 32 bits
    cache = torch.zeros(far + 2, 256, 2, 8, 128, device=CUDA, dtype=torch.bfloat16)
    kv = LayerKv.of(cache.flatten(0, 1), 256)
    kv.k[far:], kv.v[far:] = small.cache.layer(0)
    tables = small.batch.block_tables + far
    made = dataclasses.replace(small.batch, block_tables=tables)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attends.prefill(AttentionCall(small.q, kv, made, kind))
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
    assert_close(out, small.expected(kind))


@pytest.mark.parametrize("option", ["flash-attn", "auto"])
def test_a_worker_serves_with_it(tmp_path: Path, option: str) -> None:
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**SHAPE | {"head_dim": 64})).eval()
    theirs.save_pretrained(tmp_path)
    config = dataclasses.replace(CONFIG, dtype="bfloat16", attention_backend=option)
    try:
        loaded = startup.load(config, tmp_path, "bfloat16", "")
    except ValueError as error:
        pytest.skip(str(error))
    if not loaded.candidates.flash:
        pytest.skip("no version of flash-attn is installed")
    runner = startup.build_runner(config, loaded, config.num_kv_blocks)
    runner.warm_up()
    described = startup.describe(loaded, runner, incarnation=1)
    offered = {timing.backend for timing in described.attention_timings}
    assert ("triton" in offered) == (option == "auto")
    if option == "flash-attn":
        assert "triton" not in described.attention_backend
    prompts = {slot: make_prompt(5 + 40 * slot, seed=slot) for slot in range(4)}
    tokens = generate(runner, prompts, 40)
    for slot, prompt in prompts.items():
        logits = theirs(torch.tensor([prompt + tokens[slot]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens[slot])[:, None])
        assert (logits.amax(1, keepdim=True) - chosen).max() < 0.2 * logits.std()
