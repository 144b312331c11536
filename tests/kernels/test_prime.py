"""What is launched for its effect on the kernels behind it changes nothing but its scratch."""

import torch

from kernels.prime import prime


def test_only_the_scratch_is_written(device):
    memory = torch.full((8,), 7, dtype=torch.int32, device=device)
    prime(memory[3:4])
    assert memory.tolist() == [7, 7, 7, 10, 7, 7, 7, 7]
