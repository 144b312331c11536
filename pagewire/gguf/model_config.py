"""config.json and generation_config.json of a GGUF file, out of its metadata.

A key of the architecture that is not read here stands in config.json under its own name, where the
worker refuses what it does not know.
"""

import logging
import struct
from typing import Any

from pagewire.gguf import gemma
from pagewire.gguf.architecture import (
    EMBEDDING,
    HEAD,
    ROPE_FACTORS,
    GgufArchitecture,
    architecture_of,
    check_tensors,
)
from pagewire.gguf.header import GgufHeader, shortest
from pagewire.gguf.types import BF16, F16, F32

NUMBERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
}
EPSILON, THETA = "attention.layer_norm_rms_epsilon", "rope.freq_base"
ROTATED, VALUE_LENGTH, VOCAB_SIZE = "rope.dimension_count", "attention.value_length", "vocab_size"
SCALING, SCALING_FACTOR = "rope.scaling.type", "rope.scaling.factor"
ORIGINAL_LENGTH, FINETUNED = "rope.scaling.original_context_length", "rope.scaling.finetuned"
READ = frozenset(
    {*NUMBERS, *OPTIONAL, EPSILON, THETA, ROTATED, VALUE_LENGTH, VOCAB_SIZE}
    | {SCALING, SCALING_FACTOR, ORIGINAL_LENGTH, FINETUNED}
)
log = logging.getLogger(__name__)

MOST = 1 << 31  # of every size
MAX_CONTEXT = 1 << 24  # tokens; a table of positions is computed for all of them
SPLIT_COUNT, KIND = "split.count", "general.type"
DTYPES = {F32: "float32", F16: "float16", BF16: "bfloat16"}

BEGINS = "bos_token_id"
SPECIAL_IDS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "padding_token_id": "pad_token_id",
}
# Tokens that end a turn or a message, where these are not the end of the text.
MORE_ENDS = ("eot_token_id", "eom_token_id")
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def config(header: GgufHeader) -> dict[str, Any]:
    """The content of config.json. Raises BadGguf."""
    _refuse_other_files(header)
    architecture = architecture_of(header)
    sizes = _sizes(header, architecture)
    prefix = architecture.name
    content = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        **sizes,
        "rms_norm_eps": shortest(header.require(f"{prefix}.{EPSILON}", float)),
        "rope_theta": shortest(header.get(f"{prefix}.{THETA}", float, 10_000.0)),
        "rope_scaling": _rope_scaling(header, prefix, sizes["head_dim"]),
        **special_ids(header),
        "hidden_act": "silu",
        "tie_word_embeddings": HEAD not in header.tensors,
        "torch_dtype": DTYPES.get(header.tensors["blk.0.attn_q.weight"].type_name, "float32"),
        **{key: tensor in header.tensors for key, tensor in architecture.switches.items()},
    }
    rotated = header.get(f"{prefix}.{ROTATED}", int, sizes["head_dim"])
    if rotated != sizes["head_dim"]:
        content["partial_rotary_factor"] = rotated / sizes["head_dim"]
    read = READ
    if prefix in gemma.NAMES:
        content, read = gemma.config(header, prefix, content), READ | gemma.keys(prefix)
    unread = {
        key: value if isinstance(value, str | int | float) else type(value).__name__
        for key, value in header.metadata.items()
        if key.startswith(f"{prefix}.") and key.removeprefix(f"{prefix}.") not in read
    }
    return content | unread


def generation_config(header: GgufHeader) -> dict[str, Any]:
    """The content of generation_config.json: the ids that end a text, and sampling defaults."""
    ids: dict[str, Any] = dict(special_ids(header))
    ends = [ids["eos_token_id"]] if "eos_token_id" in ids else []
    for name in MORE_ENDS:
        token_id = token_id_of(header, name)
        if token_id is not None and token_id not in ends:
            ends.append(token_id)
    if len(ends) > 1:
        ids["eos_token_id"] = ends
    for key, name in SAMPLING.items():
        value = header.get(f"general.sampling.{key}", (int, float))
        if value is not None:
            ids[name] = shortest(value) if isinstance(value, float) else value
    return ids


def special_ids(header: GgufHeader) -> dict[str, int]:
    """The ids that begin, end and pad a text, as far as the file says."""
    found = {name: token_id_of(header, key) for key, name in SPECIAL_IDS.items()}
    return {name: token_id for name, token_id in found.items() if token_id is not None}


def token_id_of(header: GgufHeader, name: str) -> int | None:
    """A special token's id; None: the file names none, or one that is no id and begins no text.

    Raises BadGguf for one that would begin each text.
    """
    key = f"tokenizer.ggml.{name}"
    token_id: int | None = header.get(key, int)
    if token_id is None:
        return None
    num_tokens = len(header.require("tokenizer.ggml.tokens", list))
    if 0 <= token_id < num_tokens:
        return token_id
    problem = f"{key}: {token_id} is no id of {num_tokens} tokens"
    if name == BEGINS:
        header.refuse(problem)
    log.warning("%s: %s", header.path.name, problem)
    return None


def _refuse_other_files(header: GgufHeader) -> None:
    count = header.get(SPLIT_COUNT, int, 1)
    if count > 1:
        header.refuse(
            f"{SPLIT_COUNT}: this is one of {count} parts, and a model in parts is not read: "
            "merge them into one file"
        )
    kind = header.get(KIND, str, "model")
    if kind != "model":
        header.refuse(f"{KIND}: {kind!r} is not supported, only 'model' is")


def _sizes(header: GgufHeader, architecture: GgufArchitecture) -> dict[str, int]:
    """All sizes of the model, checked against the tensors."""
    prefix = architecture.name
    sizes = {name: _size(header, f"{prefix}.{key}") for key, name in NUMBERS.items()}
    for key, name in OPTIONAL.items():
        if f"{prefix}.{key}" in header.metadata:
            sizes[name] = _size(header, f"{prefix}.{key}")
    if sizes["max_position_embeddings"] > MAX_CONTEXT:
        found = sizes["max_position_embeddings"]
        header.refuse(f"{prefix}.context_length: {found} is above {MAX_CONTEXT}")
    num_heads, hidden_size = sizes["num_attention_heads"], sizes["hidden_size"]
    sizes.setdefault("num_key_value_heads", num_heads)
    if "head_dim" not in sizes and hidden_size % num_heads:
        problem = f"{hidden_size} is no multiple of {num_heads} heads"
        header.refuse(f"{prefix}.embedding_length: {problem}")
    sizes.setdefault("head_dim", hidden_size // num_heads)
    value_length = header.get(f"{prefix}.{VALUE_LENGTH}", int, sizes["head_dim"])
    if value_length != sizes["head_dim"]:
        header.refuse(f"{prefix}.{VALUE_LENGTH}: {value_length} is not {sizes['head_dim']}")
    sizes["vocab_size"] = _vocab_size(header, prefix)
    check_tensors(header, sizes)
    return sizes


def _size(header: GgufHeader, key: str) -> int:
    value: int = header.require(key, int)
    if not 0 < value < MOST:
        header.refuse(f"{key}: {value} is outside [1, {MOST})")
    return value


def _vocab_size(header: GgufHeader, prefix: str) -> int:
    if EMBEDDING not in header.tensors:
        header.refuse(f"tensor {EMBEDDING} is missing")
    rows = header.tensors[EMBEDDING].shape[0]
    told = header.get(f"{prefix}.{VOCAB_SIZE}", int, rows)
    if told != rows:
        header.refuse(f"{prefix}.{VOCAB_SIZE}: {told}, and {EMBEDDING} has {rows} rows")
    return rows


def _rope_scaling(header: GgufHeader, prefix: str, head_dim: int) -> dict[str, Any] | None:
    kind = header.get(f"{prefix}.{SCALING}", str, "none")
    if ROPE_FACTORS in header.tensors:
        if kind != "none":
            header.refuse(f"{prefix}.{SCALING}: {kind!r} and {ROPE_FACTORS}: only one can hold")
        return {"rope_type": "factors", "factors": _factors(header, head_dim)}
    if kind == "none":
        return None
    scaling = {"rope_type": kind}
    for key, name in (
        (SCALING_FACTOR, "factor"),
        (ORIGINAL_LENGTH, "original_max_position_embeddings"),
    ):
        value = header.get(f"{prefix}.{key}", (int, float))
        if value is not None and (kind != "linear" or name == "factor"):
            scaling[name] = value
    return scaling


def _factors(header: GgufHeader, head_dim: int) -> list[float]:
    """By what the frequency of each pair of dimensions is divided."""
    tensor = header.tensors[ROPE_FACTORS]
    if tensor.type_name != F32 or tensor.shape != (head_dim // 2,):
        found = f"{tensor.type_name} {tensor.shape}"
        header.refuse(f"tensor {ROPE_FACTORS} is {found}, expected {F32} {(head_dim // 2,)}")
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.num_bytes)))
