"""GGUF files small enough to write in milliseconds, by the `gguf` package's own writer.

A file is made of metadata by key and of tensors by name; a test changes either before it is
written. The types that the package cannot quantize to get random blocks instead.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 32, 4, 2, 8, 64, 2
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
FLOATS = {"F32": np.float32, "F16": np.float16}
# Where a block of a type that cannot be quantized here has its float16 scales, and how small these
# have to be.
K_SCALES = {"Q4_K": ((0, 0.0006), (2, 0.0045)), "Q5_K": ((0, 0.0003), (2, 0.0046))}
K_SCALES |= {
    "Q6_K": ((208, 0.00003),),
    "Q3_K": ((108, 0.0006),),
    "Q2_K": ((80, 0.004), (82, 0.005)),
}
K_SCALES |= {"IQ4_NL": ((0, 0.0006),), "IQ4_XS": ((0, 0.00003),)}

Values = np.ndarray


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor as its file has it."""

    stored: Values  # float numbers [N, K], or bytes [N, bytes of a row]
    type_name: str

    @property
    def values(self) -> Values:
        """The numbers that the `gguf` package reads from it, in float32."""
        if self.type_name in FLOATS:
            return self.stored.astype(np.float32)
        widened: Values = dequantize(self.stored, GGMLQuantizationType[self.type_name])
        return widened


def packed(values: Values, type_name: str) -> Packed:
    """A tensor in this type; for one of K_SCALES, random numbers of the same shape and size."""
    if type_name in FLOATS:
        return Packed(values.astype(FLOATS[type_name]), type_name)
    kind = GGMLQuantizationType[type_name]
    if type_name not in K_SCALES:
        return Packed(quantize(values.astype(np.float32), kind), type_name)
    size, num_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(zlib.crc32(values.tobytes()))
    blocks = random.integers(0, 256, (values.size // size, num_bytes), dtype=np.uint8)
    for place, scale in K_SCALES[type_name]:
        scales = (scale * random.uniform(0.5, 1.5, len(blocks))).astype("<f2")
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return Packed(blocks.reshape(*values.shape[:-1], -1), type_name)


@dataclass(slots=True)
class GgufFile:
    """The content of a file that is still to be written."""

    architecture: str = "llama"
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Packed] = field(default_factory=dict)

    def take_tokenizer(self, told: Mapping[str, Any]) -> None:
        """Gives it another tokenizer and template."""
        for key in [key for key in self.metadata if key.startswith("tokenizer.")]:
            del self.metadata[key]
        self.metadata |= told

    def write(self, path: Path) -> Path:
        """Writes it."""
        writer = GGUFWriter(path, self.architecture)
        for key, value in self.metadata.items():
            writer.add_key_value(key, value, _type_of(value), _type_of_items(value))
        for name, tensor in self.tensors.items():
            kind = GGMLQuantizationType[tensor.type_name]
            writer.add_tensor(name, tensor.stored, raw_dtype=None if kind < 2 else kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _type_of(value: Any) -> GGUFValueType:
    if isinstance(value, list):
        return GGUFValueType.ARRAY
    if isinstance(value, bool):
        return GGUFValueType.BOOL
    kinds = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
    return kinds[type(value)]


def _type_of_items(value: Any) -> GGUFValueType | None:
    if not isinstance(value, list):
        return None
    items = {str: GGUFValueType.STRING, int: GGUFValueType.INT32, float: GGUFValueType.FLOAT32}
    items |= {bool: GGUFValueType.BOOL}
    return items[type(value[0])]


def sizes(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a model with this configuration of a Hugging Face folder."""
    told = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
        "rope.dimension_count": config["head_dim"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
    }
    return {f"{architecture}.{key}": value for key, value in told.items()}


def vocabulary() -> dict[str, Any]:
    """The metadata of a tokenizer: control tokens, all bytes, and one merge."""
    tokens = CONTROL + sorted(ByteLevel.alphabet()) + ["ab"]
    told = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)),
        "merges": ["a b"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": False,
        "add_space_prefix": False,
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in told.items()}
    return {**named, "tokenizer.chat_template": TEMPLATE}


def sentencepiece_vocabulary(**changes: Any) -> dict[str, Any]:
    """The metadata of a tokenizer of SentencePiece, with a space before each text.

    The best score is that of the first pair of `JOINED`; ids say nothing of the order.
    """
    scores = {token: -float(rank) for rank, token in enumerate(joined_tokens())}
    letters = sorted(set("".join(scores)) - scores.keys())
    scores |= {letter: -1000.0 - rank for rank, letter in enumerate(letters)}
    told: dict[str, Any] = {
        "model": "llama",
        "pre": "default",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        "token_type": [2, 3, 3] + [6] * 256,
        "scores": [0.0] * 259,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    for token in sorted(scores):
        told["tokens"].append(token)
        told["token_type"].append(1)
        told["scores"].append(scores[token])
    named = {f"tokenizer.ggml.{key}": value for key, value in (told | changes).items()}
    return {**named, "tokenizer.chat_template": TEMPLATE}


def gemma_vocabulary() -> dict[str, Any]:
    """No space before a text, and runs of spaces and of line ends are tokens of their own."""
    told = sentencepiece_vocabulary(add_space_prefix=False)
    runs = [letter * count for letter in " \n" for count in range(2, 9)] + ["\n", "<think>"]
    told["tokenizer.ggml.tokens"] = runs + told["tokenizer.ggml.tokens"]
    told["tokenizer.ggml.token_type"] = [4] * len(runs) + told["tokenizer.ggml.token_type"]
    told["tokenizer.ggml.scores"] = [-1000.0] * len(runs) + told["tokenizer.ggml.scores"]
    for name in ("bos", "eos", "unknown"):
        told[f"tokenizer.ggml.{name}_token_id"] += len(runs)
    return told


def joined_tokens() -> list[str]:
    """Tokens that are joined of earlier ones, as training would find them; the best first."""
    random = np.random.default_rng(38)
    parts, joined = list("\u2581abcdehlorw\u00e9\u4e2d"), list[str]()
    for pair in JOINED:
        joined.append(pair)
    while len(joined) < NUM_JOINED:
        left, right = (random.choice([*parts, *joined]) for _ in range(2))
        token = str(left + right)
        if len(token) <= 8 and "\u2581" not in token[1:] and token not in joined:
            joined.append(token)
    return joined


JOINED, NUM_JOINED = ("\u2581h", "er", "lo", "\u2581w", "\u2581he", "llo", "\u2581a"), 200
NUM_TOKENS = len(vocabulary()["tokenizer.ggml.tokens"])
TINY = {
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": NUM_TOKENS,
}


def permuted(rows: Values, num_heads: int) -> Values:
    """GGUF's row order of a Hugging Face projection: rows of the two halves alternate."""
    head_dim = len(rows) // num_heads
    order = [
        head * head_dim + half * head_dim // 2 + pair
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in (0, 1)
    ]
    return rows[order]


def tiny_file(edit: Callable[[GgufFile], None] = lambda file: None) -> GgufFile:
    """A Llama of two layers with random weights; one matrix is Q8_0. `edit` changes it."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Packed:
        return Packed(random.standard_normal(shape, dtype=np.float32), "F32")

    tensors = {
        "token_embd.weight": normal(NUM_TOKENS, HIDDEN),
        "output_norm.weight": normal(HIDDEN),
    }
    for layer in range(LAYERS):
        shapes = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
        }
        tensors |= {f"blk.{layer}.{name}.weight": normal(*shape) for name, shape in shapes.items()}
        tensors[f"blk.{layer}.ffn_down.weight"] = packed(normal(HIDDEN, INNER).stored, "Q8_0")
    file = GgufFile("llama", sizes("llama", TINY) | vocabulary(), tensors)
    edit(file)
    return file
