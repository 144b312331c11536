"""Compiles the recurrent kernels for sm_90 at sizes of released models; needs no device."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.recurrent.convolve import convolve
from kernels.recurrent.delta_net import update_delta_net
from kernels.recurrent.delta_rule import DeltaHeads
from kernels.recurrent.gated_norm import gated_rms_norm
from kernels.recurrent.mamba2 import update_mamba2
from kernels.recurrent.segments import Bounds, Segments
from kernels.recurrent.selective_scan import HeadParameters, ScanHeads
from tests.kernels.compiling import empty, floats, report

ROWS, TOKENS, SEQUENCES = 40, 512, 8


def rows(states: Tensor) -> Tensor:
    """The states as a part of wider rows of memory."""
    return states.new_empty((ROWS, states.numel() + 64))[:, : states.numel()].view(
        -1, *states.shape
    )


def launch(waves: list[Segments]) -> None:
    """Every kernel, for the layers of Qwen3-Next-80B, Nemotron-3-Nano-30B and LFM2.5-1.2B."""
    delta = DeltaHeads(16, 32, 128, 128, floats(32), floats(32))
    channels, inner = 8192, 4096
    x = convolve(empty(TOKENS, channels), empty(channels, 4), None, rows(empty(channels, 3)), waves)
    y = update_delta_net(x, empty(TOKENS, 64), delta, rows(floats(32, 128, 128)), waves)
    gate = empty(TOKENS, channels + inner)[:, channels:]
    gated_rms_norm(y.flatten(1), gate, empty(128), 32, 1e-6, gate_first=False)

    numbers = HeadParameters(floats(64), floats(64))
    scan = ScanHeads(64, 64, 8, 128, numbers, floats(64))
    x = empty(TOKENS, 6144)
    y = update_mamba2(x, empty(TOKENS, 64), scan, rows(floats(64, 64, 128)), waves)
    gated_rms_norm(y, empty(TOKENS, 4096), empty(4096), 8, 1e-5, gate_first=True)

    x, states = empty(TOKENS, 3 * 2048), rows(empty(2048, 2))
    convolve(x, empty(2048, 3), None, states, waves, gated=True)


def waves() -> Iterator[Segments]:
    """Sequences of one token, and of several."""
    index = empty(SEQUENCES, dtype=torch.int64)
    segment = Segments(index, index, empty(SEQUENCES, dtype=torch.bool))
    yield segment
    number = empty(SEQUENCES, dtype=torch.int32)
    chunks = empty(TOKENS // 64 + SEQUENCES, dtype=torch.int32)
    yield Segments(index, index, segment.is_first, Bounds(number, number, chunks))


def launch_waves() -> None:
    for wave in waves():
        launch([wave])


if __name__ == "__main__":
    report(launch_waves)
