"""How far outputs of experts move when their weights are rounded to FP8 or MXFP4.

    python -m bench.compare.expert_formats [--hidden 2048] [--inner 768] [--tokens 64]

Weights and tokens are normal, of the sizes of an expert of Qwen3-30B-A3B. An error is the norm of
the difference over the norm of what is exact, in float32, so that nothing but the format counts.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.quantized.scaled import FLOAT8, LARGEST, ScaledWeight
from worker_svc.quantization import mxfp4

BLOCK = 128  # rows and columns of a block of FP8 checkpoints
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def by_channel(weight: Tensor) -> Tensor:
    """E4M3 with a scale for each output, as `--quantization fp8` rounds."""
    return ScaledWeight.rounded(weight).dequantized()


def by_block(weight: Tensor) -> Tensor:
    """E4M3 with a scale for each block of 128 x 128; both sizes are multiples of 128."""
    rows, columns = weight.shape
    blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3), keepdim=True) / LARGEST
    return ((blocks / scales).to(FLOAT8).float() * scales).view_as(weight)


def by_32(weight: Tensor) -> Tensor:
    """MXFP4: the power of two of 32 numbers puts the largest below 8, and 6 is the largest kept."""
    groups = weight.view(len(weight), -1, mxfp4.BLOCK)
    exponents = groups.abs().amax(2, keepdim=True).log2().floor() - 2
    scaled = torch.ldexp(groups, -exponents)
    codes = (scaled.abs().unsqueeze(-1) - FP4).abs().argmin(-1)
    signs = scaled.signbit() * 8
    stored = (codes + signs).to(torch.uint8)
    packed = stored[..., ::2] | stored[..., 1::2] << 4
    return mxfp4.widened(packed, (exponents.squeeze(2) + 127).to(torch.uint8), torch.float32)


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda weight: weight.bfloat16().float(),
    "fp8 by channel": by_channel,
    "fp8 by 128 x 128": by_block,
    "mxfp4": by_32,
}


def output(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """An expert's output [T, hidden] of tokens [T, hidden]."""
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def measure(hidden: int, inner: int, tokens: int) -> dict[str, tuple[float, float]]:
    """Errors of weights and of outputs by format."""
    torch.manual_seed(0)
    gate, up = (torch.randn(inner, hidden) * hidden**-0.5 for _ in range(2))
    weights = gate, up, torch.randn(hidden, inner) * inner**-0.5
    x = torch.randn(tokens, hidden)
    wanted = output(x, *weights)
    found = {}
    for name, rounded in FORMATS.items():
        kept = [rounded(weight) for weight in weights]
        of_weights = max(_error(*pair) for pair in zip(kept, weights, strict=True))
        found[name] = of_weights, _error(output(x, *kept), wanted)
    return found


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    for name, errors in measure(options.hidden, options.inner, options.tokens).items():
        line = dict(zip(("weights", "outputs"), errors, strict=True))
        sys.stdout.write(json.dumps({"format": name, **line}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
