"""Attention backends compared: ours and every installed version of flash-attn.

    python -m bench.gpu.attention --block-sizes 16 128

What start-up measures where `--attention-backend auto` has a choice, at the shapes that it decides
by: decode steps as graph replays, prompts, and a chunk of a long prompt. Every result is compared
with our kernels' first; a version that differs is named with its distance.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

from bench.harness.records import Results, add_json, new_parser
from kernels.attention_kind import AttentionKind
from worker_svc.attention import flash_attn
from worker_svc.attention.backend import AttentionTiming, Backend
from worker_svc.attention.batch import HeadLayout
from worker_svc.attention.triton import TritonAttention
from worker_svc.protocol.step import Limits
from worker_svc.tuning.attention_timing import Clock

HEADS = {"qwen3-0.6b": HeadLayout(16, 8, 128), "qwen3-8b": HeadLayout(32, 8, 128)}
MAX_MODEL_LEN = 8192


def measure(heads: HeadLayout, block_size: int) -> Iterator[AttentionTiming | str]:
    """Timings of each backend, or the reason why it has none."""
    device = torch.device("cuda")
    like = torch.empty(0, dtype=torch.bfloat16, device=device)
    ours = TritonAttention(heads, like)
    limits = Limits(
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=2,
        block_size=block_size,
        vocab_size=1,
    )
    clock = Clock(heads, AttentionKind(heads.scale), like.dtype, device, limits, ours)
    capability = torch.cuda.get_device_capability(device)
    setup = flash_attn.Setup(heads.head_dim, like.dtype, block_size, capability)
    found = flash_attn.find(setup)
    yield from found.refusals
    backends: list[Backend] = [ours, *found.backends]
    for backend in backends:
        try:
            yield from clock.measure(backend)
        except Exception as error:  # a library fails in any way
            yield f"{backend.name}: {type(error).__name__}: {error}"


def main(arguments: Sequence[str]) -> None:
    parser = new_parser("bench.gpu.attention", __doc__)
    parser.add_argument("--shapes", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16])
    add_json(parser)
    options = parser.parse_args(arguments)
    told = Results(options.json, ["python", "-m", "bench.gpu.attention", *arguments])
    for shape in options.shapes:
        for block_size in options.block_sizes:
            told.say(f"{shape}, blocks of {block_size} tokens")
            for result in measure(HEADS[shape], block_size):
                if isinstance(result, str):
                    told.say(f"  {result}")
                    continue
                told.say(
                    f"  {result.kind:8} {result.shape:22} {result.backend:14} {result.us:9.1f} us"
                )
                told.add("attention", {"model": shape, "block": block_size, **asdict(result)})


if __name__ == "__main__":
    main(sys.argv[1:])
