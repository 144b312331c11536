"""The table of pauses needs a device, and says so."""

import pytest
import torch

from bench import pauses


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_what_it_needs():
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        pauses.main([])
