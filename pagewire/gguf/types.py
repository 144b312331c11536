"""Types of GGUF's tensors: those that are read, and the names of all others for refusals."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """Blocks of consecutive elements of a row, each of the same number of bytes."""

    name: str
    block_size: int  # elements
    block_bytes: int


F32, F16, BF16 = "F32", "F16", "BF16"
FLOATS = (F32, F16, BF16)

TENSOR_TYPES = {  # by the number in the file
    0: TensorType(F32, 1, 4),
    1: TensorType(F16, 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType(BF16, 1, 2),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}
TYPE_NAMES = {number: known.name for number, known in TENSOR_TYPES.items()} | {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    40: "NVFP4",
    41: "Q1_0",
}
