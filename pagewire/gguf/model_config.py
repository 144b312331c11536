"""config.json and generation_config.json of a GGUF file, out of its metadata.

A key of the architecture that is not read here stands in config.json under its own name, where the
worker refuses what it does not know.
"""

import logging
import struct
from typing import Any

from pagewire.gguf import delta_nets, gemma, gpt_oss, short_convs, sizes
from pagewire.gguf.architecture import HEAD, ROPE_FACTORS, GgufArchitecture, architecture_of
from pagewire.gguf.header import GgufHeader, shortest
from pagewire.gguf.types import BF16, F16, F32

EPSILON, THETA = "attention.layer_norm_rms_epsilon", "rope.freq_base"
ROTATED = "rope.dimension_count"
SCALING, SCALING_FACTOR = "rope.scaling.type", "rope.scaling.factor"
ORIGINAL_LENGTH, FINETUNED = "rope.scaling.original_context_length", "rope.scaling.finetuned"
YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
# Factors of YaRN's own that no model has.
YARN_FACTORS = ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor")
READ = frozenset(
    {EPSILON, THETA, ROTATED, SCALING, SCALING_FACTOR, ORIGINAL_LENGTH, FINETUNED}
    | {*YARN, *YARN_FACTORS}
)
log = logging.getLogger(__name__)

SPLIT_COUNT, KIND = "split.count", "general.type"
# Of attention, of a delta net and of a short convolution.
FIRST_MATRICES = tuple(
    f"blk.0.{kind}.weight" for kind in ("attn_q", "attn_qkv", "shortconv.in_proj")
)
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
    found = sizes.sizes(header, architecture)
    prefix, head_dim = architecture.name, found["head_dim"]
    content = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        **found,
        "rms_norm_eps": shortest(header.require(f"{prefix}.{EPSILON}", float)),
        "rope_theta": shortest(header.get(f"{prefix}.{THETA}", float, 10_000.0)),
        "rope_scaling": _rope_scaling(header, prefix, head_dim),
        **special_ids(header),
        "hidden_act": "silu",
        "tie_word_embeddings": HEAD not in header.tensors,
        "torch_dtype": _dtype(header),
        **{key: tensor in header.tensors for key, tensor in architecture.switches.items()},
        **architecture.constants,
    }
    rotated = header.get(f"{prefix}.{ROTATED}", int, head_dim)
    if rotated != head_dim:
        content["partial_rotary_factor"] = rotated / head_dim
    _check_fixed(header, architecture)
    read = READ | sizes.keys(architecture) | architecture.fixed.keys()
    if prefix in gemma.NAMES:
        content, read = gemma.config(header, prefix, content), read | gemma.keys(prefix)
    elif prefix == gpt_oss.NAME:
        content = gpt_oss.config(header, content)
    elif architecture.has_delta_nets:
        content = delta_nets.config(header, content, rotated / head_dim)
    elif architecture.has_short_convs:
        content = short_convs.config(content)
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
    named = [token_id_of(header, name) for name in MORE_ENDS]
    for token_id in [*named, *_own_ends(header)]:
        if token_id is not None and token_id not in ends:
            ends.append(token_id)
    if len(ends) > 1:
        ids["eos_token_id"] = ends
    for key, name in SAMPLING.items():
        value = header.get(f"general.sampling.{key}", (int, float))
        if value is not None:
            ids[name] = shortest(value) if isinstance(value, float) else value
    return ids


def _own_ends(header: GgufHeader) -> list[int]:
    """The ids of the architecture's tokens that end an output, as far as they are there."""
    tokens = header.require("tokenizer.ggml.tokens", list)
    return [tokens.index(text) for text in architecture_of(header).ends if text in tokens]


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


def _dtype(header: GgufHeader) -> str:
    """The type of float numbers in which the first layer's queries, or the like, are stored."""
    first = next(header.tensors[name] for name in FIRST_MATRICES if name in header.tensors)
    return DTYPES.get(first.type_name, "float32")


def _check_fixed(header: GgufHeader, architecture: GgufArchitecture) -> None:
    """Raises BadGguf for a key that contradicts the architecture."""
    for key, only in architecture.fixed.items():
        value = header.get(f"{architecture.name}.{key}", type(only), only)
        if value != only:
            header.refuse(
                f"{architecture.name}.{key}: {value} is not {only}, which models of this "
                "architecture have"
            )


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
    return scaling | (_yarn(header, prefix) if kind == "yarn" else {})


def _yarn(header: GgufHeader, prefix: str) -> dict[str, float]:
    """The limits between which YaRN blends frequencies, as far as the file says."""
    for key in YARN_FACTORS:
        if header.get(f"{prefix}.{key}", float, 1.0) != 1.0:
            header.refuse(f"{prefix}.{key}: only 1 is supported")
    found = {name: header.get(f"{prefix}.{key}", float) for key, name in YARN.items()}
    return {name: shortest(value) for name, value in found.items() if value is not None}


def _factors(header: GgufHeader, head_dim: int) -> list[float]:
    """By what the frequency of each pair of dimensions is divided."""
    tensor = header.tensors[ROPE_FACTORS]
    if tensor.type_name != F32 or tensor.shape != (head_dim // 2,):
        found = f"{tensor.type_name} {tensor.shape}"
        header.refuse(f"tensor {ROPE_FACTORS} is {found}, expected {F32} {(head_dim // 2,)}")
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.num_bytes)))
