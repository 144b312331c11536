"""The short convolution before a recurrence, in plain PyTorch; also used on CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Depthwise convolution of x [B, N, C] with weight [C, W] over each token and those before it.

    `state` [B, C, W - 1] are the inputs before x, zeros where a sequence begins; returns the sums
    [B, N, C] and the last W - 1 inputs.
    """
    inputs = torch.cat((state, x.transpose(1, 2)), dim=-1)  # [B, C, W - 1 + N]
    if x.shape[1] == 1:  # far quicker than a convolution of so many groups
        sums = (inputs * weight).sum(-1).unsqueeze(1)
        sums = sums if bias is None else sums + bias
    else:
        sums = F.conv1d(inputs, weight.unsqueeze(1), bias, groups=len(weight)).transpose(1, 2)
    return sums, inputs[..., x.shape[1] :]
