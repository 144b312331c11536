"""Reads a Llama model in GGUF: hyperparameters and tensors, with the names of Hugging Face.

It knows names, shapes and row order, but no files except the GGUF. It refuses by name everything
that it would otherwise have to drop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from default_model.source import DefaultModelError

_REQUIRED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.dimension_count": "head_dim",
    "vocab_size": "vocab_size",
}
_SPECIAL_IDS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "padding_token_id": "pad_token_id",
}
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A weight that is computed on demand."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], NDArray[np.float32]]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * 4


def value(reader: GGUFReader, key: str) -> Any:
    """One metadata value. Raises an error that names it if it is missing."""
    field = reader.get_field(key)
    if field is None:
        raise DefaultModelError(f"the GGUF file has no {key}")
    return field.contents()


def config(reader: GGUFReader) -> dict[str, Any]:
    """The content of config.json."""
    architecture = value(reader, "general.architecture")
    if architecture != "llama":
        raise DefaultModelError(f"general.architecture {architecture!r} is not supported")
    known = {f"llama.{key}" for key in _REQUIRED}
    for key in reader.fields:
        if key.startswith("llama.") and key not in known:
            raise DefaultModelError(f"{key} is not supported")
    numbers = {name: _number(value(reader, f"llama.{key}")) for key, name in _REQUIRED.items()}
    if numbers["head_dim"] * numbers["num_attention_heads"] != numbers["hidden_size"]:
        raise DefaultModelError(
            f"llama.rope.dimension_count {numbers['head_dim']} does not cover whole heads"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **numbers,
        **special_ids(reader),
        "attention_bias": False,
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_scaling": None,
        "tie_word_embeddings": all(t.name != "output.weight" for t in reader.tensors),
        "torch_dtype": "float32",
    }


def special_ids(reader: GGUFReader) -> dict[str, int]:
    """The ids that begin, end and pad a sequence."""
    return {name: int(value(reader, f"tokenizer.ggml.{key}")) for key, name in _SPECIAL_IDS.items()}


def tensors(reader: GGUFReader) -> list[Tensor]:
    """Every weight in float32, named, shaped and ordered as in Hugging Face.

    float32 because no smaller type is exact: a Q4_1 weight is a half-precision scale times an
    integer plus a half-precision offset. Of these sums float16 would change 42 %, bfloat16 79 %.
    """
    num_layers = int(value(reader, "llama.block_count"))
    num_heads = {
        "attn_q.weight": int(value(reader, "llama.attention.head_count")),
        "attn_k.weight": int(value(reader, "llama.attention.head_count_kv")),
    }
    wanted = {name for name in _OUTER if name != "output.weight"}
    wanted |= {f"blk.{layer}.{name}" for layer in range(num_layers) for name in _LAYER}
    missing = wanted - {str(t.name) for t in reader.tensors}
    if missing:
        raise DefaultModelError(f"the GGUF file lacks {len(missing)} tensors, {min(missing)} first")
    return [_tensor(t, num_heads) for t in reader.tensors]


def unpermute(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Reorders the rows of a query or key projection for half-rotation RoPE.

    GGUF pairs neighbouring rows, (0, 1), (2, 3), ...; Hugging Face rotates row i of a head with row
    i + head_dim / 2.
    """
    num_rows, num_columns = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)  # [N, D/2, 2, C]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(num_rows, num_columns)


def _tensor(stored: Any, num_heads: dict[str, int]) -> Tensor:
    kind = stored.name.split(".", 2)[-1] if stored.name.startswith("blk.") else stored.name

    def load() -> NDArray[np.float32]:
        dense: NDArray[np.float32] = dequantize(stored.data, stored.tensor_type)
        if kind in num_heads:
            return unpermute(dense, num_heads[kind])
        return dense

    # GGUF lists the fastest dimension first.
    shape = tuple(int(size) for size in reversed(stored.shape))
    return Tensor(name=_name(stored.name), shape=shape, load=load)


def _name(stored: str) -> str:
    if stored in _OUTER:
        return _OUTER[stored]
    prefix, _, rest = stored.partition(".")
    layer, _, kind = rest.partition(".")
    if prefix != "blk" or kind not in _LAYER:
        raise DefaultModelError(f"tensor {stored} is not supported")
    return f"model.layers.{layer}.{_LAYER[kind]}"


def _number(stored: float) -> float:
    # The file has float32; the shortest decimal with this value is what its author wrote.
    return stored if isinstance(stored, int) else float(str(np.float32(stored)))
