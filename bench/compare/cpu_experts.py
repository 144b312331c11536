"""CPU: tokens per second of models with experts, by pagewire's layers and by transformers.

    python -m bench.compare.cpu_experts --shape qwen3-30b-a3b gpt-oss-20b-mxfp4 --layers 4

Shapes of real models, cut to a few layers, with random weights: no checkpoint is read. Both sides
compute the same prompts of random ids and then one token after another, greedily, in one process
without services; prompts count. With --threads 1 only that thread's CPU time counts, so that other
processes have little effect. transformers generates for all streams in one batch. It holds experts
in MXFP4 as bfloat16, as it does on a CPU when it has read them. The sides run one after the other,
and the best run counts. Prints a JSON line for each shape, side and number of streams.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bench.compare.cpu_steps import BLOCK_SIZE
from bench.harness import checkpoints, services
from worker_svc.attention.batch import AttentionBatch
from worker_svc.device.device import DTYPES
from worker_svc.models.stored.loading import DUMMY, load_model

CPU = torch.device("cpu")
Generate = Callable[[Tensor, int], None]  # prompts [B, T], and the number of tokens to make


def pagewire(config: dict[str, Any], dtype: torch.dtype, max_model_len: int) -> Generate:
    """Generation by layers of pagewire."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        model = load_model(Path(folder), dtype, CPU, max_model_len, load_format=DUMMY)

    @torch.inference_mode()
    def generate(prompts: Tensor, count: int) -> None:
        streams, length = prompts.shape
        width = -(-(length + count) // BLOCK_SIZE)
        tables = 1 + torch.arange(streams * width, dtype=torch.int32).view(streams, width)
        cache = model.new_cache(1 + streams * width, BLOCK_SIZE)
        new, end = prompts, length
        for _ in range(count):
            num_new = new.shape[1]
            batch, positions = _batch(tables, end, num_new)
            hidden = model.forward(new.flatten(), positions, cache, batch)
            new = model.logits(hidden[num_new - 1 :: num_new]).argmax(-1, keepdim=True)
            end += 1

    return generate


def _batch(tables: Tensor, end: int, num_new: int) -> tuple[AttentionBatch, Tensor]:
    """A step of sequences of this length, with so many new tokens each; and their positions."""
    streams = len(tables)
    positions = torch.arange(end - num_new, end)
    slots = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    batch = AttentionBatch(
        slot_mapping=slots.flatten(),
        block_tables=tables,
        context_lens=torch.full((streams,), end, dtype=torch.int32),
        cu_seqlens_q=num_new * torch.arange(streams + 1, dtype=torch.int32),
        max_seqlen_q=num_new,
        max_context_len=end,
    )
    return batch, positions.repeat(streams)


def transformers(config: dict[str, Any], dtype: torch.dtype) -> Generate:
    """Generation by the class of transformers."""
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(plain))
        settings = AutoConfig.from_pretrained(folder)
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(settings, dtype=dtype)
    tables = dict(model.named_buffers())
    model = model.to_empty(device="cpu")
    for weight in model.parameters():
        torch.nn.init.uniform_(weight, -0.03, 0.03)
    # Tables of rotations are computed, not read.
    assert all("rotary" in name for name in tables), list(tables)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=settings)
    model.generation_config.eos_token_id = None

    def generate(prompts: Tensor, count: int) -> None:
        model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=count,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip

    return generate


def best_s(
    generate: Generate, prompts: Tensor, count: int, repeats: int, clock: Callable[[], float]
) -> float:
    """Seconds of the best run; the first one warms up."""
    times = []
    for _ in range(repeats + 1):
        began_s = clock()
        generate(prompts, count)
        times.append(clock() - began_s)
    return min(times[1:])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare.cpu_experts",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", nargs="+", choices=checkpoints.NAMES, required=True)
    add("--layers", type=int, default=4)
    add("--streams", type=int, nargs="+", default=[1, 8])
    add("--threads", type=int, default=os.cpu_count() or 1)
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--prompt-tokens", type=int, default=16)
    add("--output-tokens", type=int, default=32)
    add("--repeats", type=int, default=3, help="runs, of which the best counts")
    add("--side", choices=["both", "pagewire", "transformers"], default="both")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints a JSON line for each shape, side and number of streams."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    dtype, count = DTYPES[options.dtype], options.output_tokens
    max_model_len = options.prompt_tokens + count
    sides: dict[str, Callable[[dict[str, Any]], Generate]] = {
        "transformers": lambda config: transformers(config, dtype),
        "pagewire": lambda config: pagewire(config, dtype, max_model_len),
    }
    for shape in options.shape:
        config: dict[str, Any] = dict(checkpoints.config_of(shape, options.layers))
        for side, made_of in sides.items():
            if options.side not in ("both", side):
                continue
            generate = made_of(config)
            for streams in options.streams:
                generator = torch.Generator().manual_seed(streams)
                size = streams, options.prompt_tokens
                prompts = torch.randint(1, config["vocab_size"], size, generator=generator)
                best = best_s(generate, prompts, count, options.repeats, clock)
                row = {"shape": shape, "layers": options.layers, "side": side, "streams": streams}
                rate = {
                    "tokens_per_s": round(streams * count / best, 2),
                    "dtype": options.dtype,
                    "threads": options.threads,
                }
                shared = {"hardware": services.hardware(), "commit": services.commit()}
                print(json.dumps(row | rate | shared), flush=True)
            del generate
            gc.collect()


if __name__ == "__main__":
    main(sys.argv[1:])
