"""Step times of other engines for the same work, and the least possible.

Measured once, on one H200 or two, in bfloat16, with random weights of the same shapes and the same
256 requests; steps at a mean context of about 576. Floor and ceiling are the bytes that a step must
read, or the operations it must do, at the rates of a plain copy and a large GEMM. Of 8B
with 256 rows the floor is a sum: attention, bound by memory, and then GEMMs, bound by arithmetic.
"""

VLLM, NANO_VLLM = "vLLM 0.24", "nano-vLLM"
FLOOR, CEILING = "floor", "ceiling"

# (shape, number of GPUs) to batch to engine.
STEP_MS: dict[tuple[str, int], dict[int, dict[str, float]]] = {
    ("qwen3-0.6b", 1): {
        1: {VLLM: 1.75, NANO_VLLM: 2.14, FLOOR: 0.30},
        8: {VLLM: 1.72, NANO_VLLM: 2.15, FLOOR: 0.40},
        32: {VLLM: 2.20, NANO_VLLM: 2.85, FLOOR: 0.77},
        128: {VLLM: 4.37, NANO_VLLM: 5.02, FLOOR: 2.26},
        256: {VLLM: 7.22, NANO_VLLM: 8.25, FLOOR: 4.24},
    },
    ("qwen3-8b", 1): {
        1: {VLLM: 5.17, FLOOR: 3.57},
        32: {VLLM: 6.13, FLOOR: 4.18},
        256: {VLLM: 14.64, FLOOR: 10.0},
    },
    ("qwen3-8b", 2): {
        1: {VLLM: 3.78, FLOOR: 1.8},
        32: {VLLM: 4.45, FLOOR: 2.1},
        256: {VLLM: 9.67, FLOOR: 5.0},
    },
}
TOKENS_PER_S: dict[tuple[str, int], dict[str, float]] = {
    ("qwen3-0.6b", 1): {VLLM: 23_535, NANO_VLLM: 20_132, CEILING: 36_173},
    ("qwen3-8b", 1): {VLLM: 9_236, NANO_VLLM: 8_716, CEILING: 12_949},
}
