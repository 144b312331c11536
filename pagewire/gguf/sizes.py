"""The sizes of a GGUF file's model, read from its metadata and checked against its tensors."""

from pagewire.gguf.architecture import EMBEDDING, EXPERTS, GgufArchitecture, GgufExperts
from pagewire.gguf.header import GgufHeader
from pagewire.gguf.shapes import check_tensors

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
VALUE_LENGTH, VOCAB_SIZE = "attention.value_length", "vocab_size"
USED_EXPERTS, EXPERT_SIZE = "expert_used_count", "expert_feed_forward_length"
KEYS = frozenset({*NUMBERS, *OPTIONAL, VALUE_LENGTH, VOCAB_SIZE})
EXPERT_KEYS = frozenset({EXPERTS, USED_EXPERTS, EXPERT_SIZE})

MOST = 1 << 31  # of every size
MAX_CONTEXT = 1 << 24  # tokens; a table of positions is computed for all of them


def keys(architecture: GgufArchitecture) -> frozenset[str]:
    """The keys of an architecture that `sizes` reads, without its name."""
    return KEYS if architecture.experts is None else KEYS | EXPERT_KEYS


def sizes(header: GgufHeader, architecture: GgufArchitecture) -> dict[str, int]:
    """All sizes of the model, checked against the tensors."""
    prefix = architecture.name
    found = {name: _size(header, f"{prefix}.{key}") for key, name in NUMBERS.items()}
    for key, name in OPTIONAL.items():
        if f"{prefix}.{key}" in header.metadata:
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
    if architecture.experts is not None:
        found |= _expert_sizes(header, prefix, architecture.experts)
    check_tensors(header, found)
    return found


def _expert_sizes(header: GgufHeader, prefix: str, experts: GgufExperts) -> dict[str, int]:
    """The number of experts, of those that a token has, and their size."""
    count, used = _size(header, f"{prefix}.{EXPERTS}"), _size(header, f"{prefix}.{USED_EXPERTS}")
    if used > count:
        header.refuse(f"{prefix}.{USED_EXPERTS}: {used} of {count} experts")
    told = {experts.count: count, "num_experts_per_tok": used}
    if f"{prefix}.{EXPERT_SIZE}" in header.metadata or experts.size not in NUMBERS.values():
        told[experts.size] = _size(header, f"{prefix}.{EXPERT_SIZE}")
    return told


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
