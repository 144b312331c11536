"""The sizes of a GGUF file's model, read from its metadata and checked against its tensors."""

from typing import Any

from pagewire.gguf import delta_nets, short_convs
from pagewire.gguf.architecture import (
    DRAFTING,
    EMBEDDING,
    EXPERTS,
    GgufArchitecture,
    GgufExperts,
)
from pagewire.gguf.header import GgufHeader
from pagewire.gguf.shapes import check_tensors

NUMBERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
OPTIONAL = {
    "feed_forward_length": "intermediate_size",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
}
VALUE_LENGTH, VOCAB_SIZE = "attention.value_length", "vocab_size"
USED_EXPERTS, EXPERT_SIZE = "expert_used_count", "expert_feed_forward_length"
KEYS = frozenset({*NUMBERS, *OPTIONAL, VALUE_LENGTH, VOCAB_SIZE})
SHARED_SIZE = "expert_shared_feed_forward_length"
EXPERT_KEYS = frozenset({EXPERTS, USED_EXPERTS, EXPERT_SIZE, SHARED_SIZE})

MOST = 1 << 31  # of every size
MAX_CONTEXT = 1 << 24  # tokens; a table of positions is computed for all of them


def keys(architecture: GgufArchitecture) -> frozenset[str]:
    """The keys of an architecture that `sizes` reads, without its name."""
    found = KEYS if architecture.experts is None else KEYS | EXPERT_KEYS
    found |= delta_nets.KEYS | {DRAFTING} if architecture.has_delta_nets else set()
    return found | short_convs.KEYS if architecture.has_short_convs else found


def sizes(header: GgufHeader, architecture: GgufArchitecture) -> dict[str, Any]:
    """All sizes of the model, checked against the tensors."""
    prefix = architecture.name
    found: dict[str, Any] = {
        name: _size(header, f"{prefix}.{key}") for key, name in NUMBERS.items()
    }
    if architecture.has_short_convs:
        found |= short_convs.sizes(header, prefix, found["num_hidden_layers"])
    for key, name in OPTIONAL.items():
        if name not in found and f"{prefix}.{key}" in header.metadata:
            found[name] = _size(header, f"{prefix}.{key}")
    if found["max_position_embeddings"] > MAX_CONTEXT:
        length = found["max_position_embeddings"]
        header.refuse(f"{prefix}.context_length: {length} is above {MAX_CONTEXT}")
    num_heads, hidden_size = found["num_attention_heads"], found["hidden_size"]
    found.setdefault("num_key_value_heads", num_heads)
    if "head_dim" not in found and hidden_size % num_heads:
        problem = f"{hidden_size} is no multiple of {num_heads} heads"
        header.refuse(f"{prefix}.embedding_length: {problem}")
    found.setdefault("head_dim", hidden_size // num_heads)
    value_length = header.get(f"{prefix}.{VALUE_LENGTH}", int, found["head_dim"])
    if value_length != found["head_dim"]:
        header.refuse(f"{prefix}.{VALUE_LENGTH}: {value_length} is not {found['head_dim']}")
    found["vocab_size"] = _vocab_size(header, prefix)
    if architecture.has_delta_nets:
        _add_delta_nets(header, prefix, found)
    if architecture.experts is None:
        _size(header, f"{prefix}.feed_forward_length")
    else:
        found |= _expert_sizes(header, prefix, architecture.experts)
    check_tensors(header, found)
    return found


def _expert_sizes(header: GgufHeader, prefix: str, experts: GgufExperts) -> dict[str, int]:
    """The number of experts, of those that a token has, and their size."""
    count, used = _size(header, f"{prefix}.{EXPERTS}"), _size(header, f"{prefix}.{USED_EXPERTS}")
    if used > count:
        header.refuse(f"{prefix}.{USED_EXPERTS}: {used} of {count} experts")
    told = {experts.count: count, "num_experts_per_tok": used}
    # Files of llama's name say one size for all kinds of models.
    has_own = f"{prefix}.{EXPERT_SIZE}" in header.metadata or experts.size != "intermediate_size"
    key = EXPERT_SIZE if has_own else "feed_forward_length"
    told[experts.size] = _size(header, f"{prefix}.{key}")
    if experts.has_shared:
        told["shared_expert_intermediate_size"] = _size(header, f"{prefix}.{SHARED_SIZE}")
    return told


def _add_delta_nets(header: GgufHeader, prefix: str, found: dict[str, Any]) -> None:
    """Adds the sizes of delta nets, and the kind of each layer; takes off layers that draft."""
    for key, name in delta_nets.NUMBERS.items():
        found[name] = _size(header, f"{prefix}.{key}")
    num_heads, num_key_heads = found["linear_num_value_heads"], found["linear_num_key_heads"]
    inner = _size(header, f"{prefix}.{delta_nets.INNER}")
    for key, size, parts in (
        ("ssm.time_step_rank", num_heads, num_key_heads),
        (delta_nets.INNER, inner, num_heads),
    ):
        if size % parts:
            header.refuse(f"{prefix}.{key}: {size} is no multiple of {parts} heads")
    found["linear_value_head_dim"] = inner // num_heads
    num_drafting = header.get(f"{prefix}.{DRAFTING}", int, 0)
    found["num_hidden_layers"] -= num_drafting
    if num_drafting < 0 or found["num_hidden_layers"] < 1:
        header.refuse(f"{prefix}.{DRAFTING}: {num_drafting} leave no layers")
    if found["num_hidden_layers"] > len(header.tensors):
        header.refuse(
            f"{found['num_hidden_layers']} layers, and {len(header.tensors)} tensors in all"
        )
    interval = _size(header, f"{prefix}.{delta_nets.INTERVAL}")
    found["layer_types"] = delta_nets.layer_types(interval, found["num_hidden_layers"])


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
