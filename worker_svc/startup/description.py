"""Description of a worker for schedulers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kernels.gemm.cublas_lt import GemmShape
from worker_svc.attention.backend import AttentionTiming
from worker_svc.models.gemm_choices import GemmChoice


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the served model."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    config_sha256: str
    tokenizer_sha256: str  # empty when the folder has no tokenizer.json
    dtype: str
    quantization: str  # none, or method and format in words


@dataclass(frozen=True, slots=True)
class Description:
    """Everything that a scheduler needs to know about this worker."""

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
    graph_batch_sizes: tuple[int, ...]  # empty on CPU
    attention_timings: tuple[AttentionTiming, ...] = ()  # empty without a choice
    gemm_choices: Mapping[GemmShape, GemmChoice] = field(default_factory=dict)  # by shape
    num_host_blocks: int = 0
    verifies_drafts: bool = False
    rank: int = 0
    world_size: int = 1
    all_reduce: str = ""  # implementation; empty without tensor parallelism
    rehearsed_s: Mapping[int, float] = field(default_factory=dict)  # by number of tokens
    rank_addresses: tuple[str, ...] = ()  # by rank; empty without tensor parallelism
