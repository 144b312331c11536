"""Tensor parallelism: the sizes of each rank, and its shard of each tensor.

Attention is sharded by heads, the MLP by its inner dimension, embedding and LM head by vocabulary.
With more ranks than KV heads several ranks hold the same KV head, each with different query heads.
"""

from dataclasses import dataclass, replace

from worker_svc.models.config import ModelConfig, UnsupportedModel
from worker_svc.models.weights import Share

# The sharded dimension of a checkpoint's tensor, by the end of its name; other tensors are whole on
# every rank. Rows of a weight are outputs, so the linear layer after a sharded one is sharded by
# its inputs.
DIVIDED = {
    "embed_tokens.weight": 0,
    "lm_head.weight": 0,
    "q_proj.weight": 0,
    "q_proj.bias": 0,
    "k_proj.weight": 0,
    "k_proj.bias": 0,
    "v_proj.weight": 0,
    "v_proj.bias": 0,
    "o_proj.weight": 1,
    "gate_proj.weight": 0,
    "gate_proj.bias": 0,
    "up_proj.weight": 0,
    "up_proj.bias": 0,
    "down_proj.weight": 1,
}


@dataclass(frozen=True, slots=True)
class Sharding:
    """One rank's shard. Raises UnsupportedModel, naming the size that does not divide."""

    whole: ModelConfig
    rank: int
    size: int

    def __post_init__(self) -> None:
        whole, size = self.whole, self.size
        self._check("num_attention_heads", whole.num_heads)
        self._check("intermediate_size", whole.intermediate_size)
        self._check("vocab_size", whole.vocab_size)
        if size < whole.num_kv_heads:
            self._check("num_key_value_heads", whole.num_kv_heads)
        elif size % whole.num_kv_heads:
            raise UnsupportedModel(
                f"tensor_parallel_size: {size} ranks are no multiple of "
                f"{whole.num_kv_heads} num_key_value_heads"
            )

    @property
    def config(self) -> ModelConfig:
        """The model's configuration with the sizes of one rank."""
        whole, size = self.whole, self.size
        if size == 1:
            return whole
        return replace(
            whole,
            vocab_size=whole.vocab_size // size,
            intermediate_size=whole.intermediate_size // size,
            num_heads=whole.num_heads // size,
            num_kv_heads=max(1, whole.num_kv_heads // size),
        )

    @property
    def first_token(self) -> int:
        """The first token id in this rank's part of the vocabulary."""
        return self.rank * self.config.vocab_size

    @property
    def kv_heads(self) -> slice:
        """This rank's KV heads, among those of the whole model."""
        count = self.config.num_kv_heads
        first = self.rank * self.whole.num_kv_heads // self.size
        return slice(first, first + count)

    def share(self, name: str) -> Share | None:
        """The shard of a checkpoint's tensor that this rank reads; None: the whole tensor."""
        end = ".".join(name.rsplit(".", 2)[-2:])
        if self.size == 1 or end not in DIVIDED:
            return None
        if end.startswith(("k_proj", "v_proj")):
            count = min(self.size, self.whole.num_kv_heads)
        else:
            count = self.size
        return Share(DIVIDED[end], self.rank // (self.size // count), count)

    def _check(self, name: str, value: int) -> None:
        if value % self.size:
            raise UnsupportedModel(
                f"{name}: {value} does not divide among tensor_parallel_size {self.size}"
            )
