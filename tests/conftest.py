"""Settings that must be made before any test module is imported."""

import os
from pathlib import Path

# Triton reads this at its first import, which transformers also triggers: without a GPU its kernels
# are interpreted, on CPU tensors.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
