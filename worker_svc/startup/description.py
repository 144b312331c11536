"""Description of a worker for schedulers."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kernels.gemm.cublas_lt import GemmShape
from pagewire.gguf.files import model_name, read_file
from worker_svc.adapters.store import AdapterStore
from worker_svc.attention.backend import AttentionTiming
from worker_svc.models.gemm_choices import GemmChoice
from worker_svc.models.step_model import ModelShape
from worker_svc.protocol.kv_groups import LayerGroup

TOKENIZER = "tokenizer.json"


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
class TierFacts:
    """Memory besides the cache that blocks are kept in, by content."""

    name: str
    num_blocks: int
    bytes_per_block: int


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
    tiers: tuple[TierFacts, ...] = ()
    kv_layout_hash: bytes = b""
    kv_handles: Mapping[str, bytes] = field(default_factory=dict)  # by transport
    verifies_drafts: bool = False
    encodes_pictures: bool = False
    keeps_pictures_whole: bool = False  # tokens of one see each other both ways
    draft_model: ModelFacts | None = None  # None: it has none
    rank: int = 0
    world_size: int = 1
    all_reduce: str = ""  # implementation; empty without tensor parallelism
    rehearsed_s: Mapping[int, float] = field(default_factory=dict)  # by number of tokens
    rank_addresses: tuple[str, ...] = ()  # by rank; empty without tensor parallelism
    has_states: bool = False  # a slot has states besides its blocks
    num_state_snapshots: int = 0
    kv_groups: tuple[LayerGroup, ...] = ()  # group 0 first; empty: it alone, without a window
    adapters: AdapterStore | None = None  # None: it serves none


def facts_of(
    shape: ModelShape, folder: Path, name: str, dtype: torch.dtype, max_model_len: int
) -> ModelFacts:
    """The facts of a folder's or a GGUF file's model; without a `name` it has the folder's."""
    return ModelFacts(
        name=name or model_name(folder),
        architecture=shape.architecture,
        vocab_size=shape.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=shape.eos_token_ids,
        config_sha256=_sha256(folder, "config.json"),
        tokenizer_sha256=_sha256(folder, TOKENIZER),
        dtype=str(dtype).removeprefix("torch."),
        quantization="none" if shape.quantization is None else shape.quantization.label,
    )


def _sha256(folder: Path, name: str) -> str:
    content = read_file(folder, name)
    return "" if content is None else hashlib.sha256(content).hexdigest()
