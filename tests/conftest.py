"""What must be settled before any test module is imported."""

import os
from pathlib import Path

# Triton reads this when it is first imported, which transformers does too: without a GPU its
# kernels are interpreted, on CPU tensors.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
