"""What a worker says of itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kernels.gemm.cublas_lt import ProductShape
from worker_svc.attention.backend import AttentionTiming
from worker_svc.models.gemm_choices import GemmChoice


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is served."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    config_sha256: str
    tokenizer_sha256: str  # empty when the folder has no tokenizer.json
    dtype: str


@dataclass(frozen=True, slots=True)
class Description:
    """What a scheduler must know of this worker."""

    model: ModelFacts
    incarnation: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str
    kv_dtype: str
    kv_layout: str
    attention_backend: str
    graph_batch_sizes: tuple[int, ...]  # none on CPU
    attention_timings: tuple[AttentionTiming, ...] = ()  # none where there was no choice
    product_choices: Mapping[ProductShape, GemmChoice] = field(default_factory=dict)  # likewise
    num_host_blocks: int = 0
    rank: int = 0
    world_size: int = 1
    all_reduce: str = ""  # what adds up over the ranks; empty for a group of one
    rehearsed_s: Mapping[int, float] = field(default_factory=dict)  # of steps, by their tokens
    rank_addresses: tuple[str, ...] = ()  # where each rank answers; none for a group of one
