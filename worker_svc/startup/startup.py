"""Builds the parts of each start-up phase: the loaded model, then a runner with its KV cache."""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kernels import fp8
from kernels.attention_kind import AttentionKind
from kernels.gemm import cublas_lt
from pagewire.gguf.files import read_file
from wire.grammar import Vocabulary, read_vocabulary
from wire.grammar_check.checks import GrammarChecks, VocabularySource
from wire.versions import DISK_TIER, HOST_TIER
from worker_svc.attention.backend import LayerChoices
from worker_svc.attention.flash_attn import Setup
from worker_svc.attention.kv_plan import KvPlan
from worker_svc.config import GPU_MEMORY_UTILIZATION, WorkerConfig, require_device
from worker_svc.device.device import (
    kv_dtype_name,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
)
from worker_svc.models import DUMMY, Decoder, load_model
from worker_svc.models import config as model_config
from worker_svc.models.spec import ModelSpec
from worker_svc.models.step_model import StepModel
from worker_svc.moves.layout import layout_hash
from worker_svc.parallel.group import ALONE, Group, device_of
from worker_svc.protocol.step import Limits
from worker_svc.quantization import registry
from worker_svc.runner.eager_runner import EagerRunner
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.sampling.grammars import Grammars
from worker_svc.startup import (
    adapters,
    disk_tier,
    draft_model,
    early_sizing,
    host_tier,
    implementation,
    key_offsets,
    kv_groups,
    kv_scales,
    kv_sizing,
    precompile,
)
from worker_svc.startup.description import (
    TOKENIZER,
    Description,
    ModelFacts,
    TierFacts,
    facts_of,
)
from worker_svc.startup.draft_model import LoadedDraft
from worker_svc.startup.pictures import picture_outputs
from worker_svc.startup.precompile import Precompile
from worker_svc.tuning import attention
from worker_svc.tuning.attention import Candidates, Measure, choose
from worker_svc.tuning.attention_timing import Clock
from worker_svc.tuning.cpu_dtype import WeightShapes, quickest

if TYPE_CHECKING:
    from worker_svc.models.composed import ComposedStack
    from worker_svc.models.fused import FusedDecoder
    from worker_svc.transformers_models.config import TransformersConfig

log = logging.getLogger(__name__)

# Defaults by device. Decoding rows wait for a prefill chunk, so it is short on a CPU.
MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, its facts and its folder or GGUF file."""

    decoder: StepModel
    facts: ModelFacts
    dtype: torch.dtype
    device: torch.device
    folder: Path
    compiling: tuple[Precompile, ...]  # see `finish_compiling`
    candidates: Candidates  # attention backends to choose from
    draft: LoadedDraft | None = None  # the model that drafts for it
    kv_plan: KvPlan | None = None  # None: all layers keep all tokens, under one block table

    @property
    def decoders(self) -> list[StepModel]:
        """The decoders of the model, and of the one that drafts for it."""
        return [self.decoder] if self.draft is None else [self.decoder, self.draft.decoder]

    @property
    def natives(self) -> list[Decoder]:
        """The decoders with layers of ours, which have kernels to choose."""
        return [decoder for decoder in self.decoders if isinstance(decoder, Decoder)]


def load(
    config: WorkerConfig,
    folder: Path,
    dtype_name: str,
    served_model_name: str,
    group: Group = ALONE,
    compiling: Precompile | None = None,
) -> LoadedModel:
    """Reads a model's weights, or this rank's shard of them, while kernels are compiled."""
    device = device_of(group.rank, group.size, resolve_device(config.device))
    require_device(config, device.type)
    adapters.require_adaptable(config, device.type)
    shape = implementation.shape_of(config, folder, device)
    if isinstance(shape, ModelSpec):
        return _load_natively(
            config, folder, shape, dtype_name, served_model_name, group, device, compiling
        )
    return _load_of_transformers(
        config, folder, shape, dtype_name, served_model_name, group, device, compiling
    )


def _load_natively(
    config: WorkerConfig,
    folder: Path,
    shape: ModelSpec,
    dtype_name: str,
    served_model_name: str,
    group: Group,
    device: torch.device,
    compiling: Precompile | None,
) -> LoadedModel:
    """The model with layers of ours."""
    dtype = resolve_dtype(
        dtype_name,
        device,
        shape.checkpoint_dtype,
        _measured_dtype(shape, group),
    )
    max_model_len = config.max_model_len or shape.max_model_len
    kv_dtype = _kv_dtype_of(config, shape, dtype, device)
    implementation.check_states(config, shape, kv_dtype)
    head_dim = max(attention.head_dim for attention in shape.attentions)
    candidates = _candidates(config, device, dtype, kv_dtype, head_dim)
    _require_room(config, shape, kv_dtype, device, max_model_len)
    log.info("loading %s as %s on %s", folder, _name(dtype), device)
    helpers = (
        _compiling(config, folder, dtype_name, device, group, compiling),
        _compiling_draft(config, _name(dtype), device, group, max_model_len),
    )
    decoder = load_model(
        folder,
        dtype,
        device,
        max_model_len,
        group,
        config.ignore_config_keys,
        config.quantization,
        kv_dtype,
        config.ignore_weights,
        config.load_format,
    )
    if fp8.is_fp8(kv_dtype):
        has_files = config.load_format != DUMMY
        decoder.kv_scales = kv_scales.read(folder, decoder.sharding, device, has_files=has_files)
    facts = facts_of(shape, folder, served_model_name, dtype, max_model_len)
    draft = draft_model.load(config, facts, decoder) if config.draft_model else None
    running = tuple(helper for helper in helpers if helper is not None)
    plan = kv_groups.plan_for(config, decoder, max_model_len)
    return LoadedModel(decoder, facts, dtype, device, folder, running, candidates, draft, plan)


def _measured_dtype(shape: ModelSpec, group: Group) -> Callable[[], torch.dtype] | None:
    """The search for the quickest type on this CPU; None: there is no measure.

    So it is for ranks, for experts and for layers that differ.
    """
    differ = len({layer.shape for layer in shape.layers}) > 1
    if group.size > 1 or shape.has_experts or differ:
        return None
    return lambda: quickest(WeightShapes.of(shape))


def _load_of_transformers(
    config: WorkerConfig,
    folder: Path,
    shape: "TransformersConfig",
    dtype_name: str,
    served_model_name: str,
    group: Group,
    device: torch.device,
    compiling: Precompile | None,
) -> LoadedModel:
    """The same by classes of transformers, for which no kernels are compiled ahead."""
    if compiling is not None:
        compiling.stop()
    dtype = resolve_dtype(dtype_name, device, shape.checkpoint_dtype, None)
    kv_dtype = _kv_dtype_of(config, shape, dtype, device)
    max_model_len = config.max_model_len or shape.max_model_len
    log.info("loading %s as %s on %s by transformers", folder, _name(dtype), device)
    model = implementation.load(config, folder, shape, dtype, kv_dtype, device, group)
    facts = facts_of(shape, folder, served_model_name, dtype, max_model_len)
    kv_plan = kv_groups.plan_for(config, model, max_model_len)
    return LoadedModel(model, facts, dtype, device, folder, (), Candidates(), kv_plan=kv_plan)


def _kv_dtype_of(
    config: WorkerConfig,
    shape: "ModelSpec | TransformersConfig",
    dtype: torch.dtype,
    device: torch.device,
) -> torch.dtype:
    """The type of stored keys and values; the checkpoint may name the one of `auto`."""
    asked = config.kv_cache_dtype
    if asked == "auto":
        asked = registry.stored_kv_cache_dtype(shape.quantization) or asked
    return resolve_kv_dtype(asked, dtype, device)


def _require_room(
    config: WorkerConfig,
    shape: ModelSpec,
    kv_dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
) -> None:
    """Raises CacheTooSmall; not where a call of InitializeCache will say how many blocks."""
    if config.model is None:
        return
    models = [shape]
    if config.draft_model is not None:
        models.append(model_config.load(config.draft_model, config.ignore_config_keys))
    limits = shape_limits(config, device.type, max_model_len, shape.vocab_size)
    early_sizing.require_room(config, models, kv_dtype, device, limits)


def _compiling(
    config: WorkerConfig,
    folder: Path,
    dtype_name: str,
    device: torch.device,
    group: Group,
    begun: Precompile | None,
) -> Precompile | None:
    """The helper that compiles kernels: `begun`, or on rank 0 a new one; None on a CPU."""
    if device.type != "cuda":
        if begun is not None:
            begun.stop()
        return None
    if begun is None and group.rank == 0:
        return precompile.start(config, folder, dtype_name)
    return begun


def _compiling_draft(
    config: WorkerConfig, dtype_name: str, device: torch.device, group: Group, max_model_len: int
) -> Precompile | None:
    """The helper for the draft model, which has the types and lengths of the model served."""
    folder = config.draft_model
    if folder is None or device.type != "cuda":
        return None
    config = replace(config, max_model_len=max_model_len, quantization="auto")
    return _compiling(config, folder, dtype_name, device, group, None)


def finish_compiling(model: LoadedModel) -> None:
    """Waits for the helpers, so that the worker does not compile the same kernels."""
    for helper in model.compiling:
        helper.wait()


def build_runner(config: WorkerConfig, model: LoadedModel, num_blocks: int) -> ModelRunner:
    """Allocates the slots and the KV cache: `num_blocks` blocks, or for 0 as many as fit.

    Counting the blocks that fit runs the largest step, so this waits for the kernels.
    """
    finish_compiling(model)
    if model.device.type == "cuda":
        # Modules and weights stay, and each of the captures to come searches for garbage.
        gc.collect()
        gc.freeze()
    group = model.decoder.group
    # Before anything is tuned, which may turn out otherwise at the next start.
    for decoder in model.natives:
        key_offsets.set_offsets(decoder, model.facts.max_model_len)
    _choose_attention(config, model)
    for decoder in model.natives:
        _choose_gemm_algorithms(config, model, decoder)
        _choose_cluster_layers(config, model, decoder)
    # Before the cache takes what is left, and before graphs record what adapters add.
    store = adapters.store_for(config, model.decoder)
    num_blocks = num_blocks or group.smallest(lambda: _num_blocks_that_fit(config, model))
    limits = _limits(config, model, num_blocks)
    kv_sizing.require_one_sequence(num_blocks, limits)
    log.info(
        "KV cache in %s: %d blocks of %d tokens, %.2f GiB",
        kv_dtype_name(model.decoder.kv_dtype),
        num_blocks,
        limits.block_size,
        num_blocks * _block_bytes(config, model) / kv_sizing.GIB,
    )
    num_tables = 1 if model.kv_plan is None else 1 + len(model.kv_plan.groups)
    host_tier.require_tiered(config, model.decoder, num_tables)
    host_tier.require_movable(config, model.decoder, num_tables)
    block_bytes = group.size * _block_bytes(config, model)
    num_tier_blocks = host_tier.num_tier_blocks(config, block_bytes)
    kv_sizing.require_host_memory(config.host_blocks, block_bytes, num_tier_blocks)
    num_disk_blocks = disk_tier.num_blocks(config, block_bytes)
    tiers = num_tier_blocks, num_disk_blocks
    runner = _runner(config, model, num_blocks, config.host_blocks, tiers)
    runner.state.adapters = store
    return runner


def describe(model: LoadedModel, runner: ModelRunner, incarnation: int) -> Description:
    """The description of a worker, without rehearsed times and rank addresses."""
    limits, fused, layers = runner.limits, model.decoder.fused, _on_cuda(model.decoder)
    return Description(
        model=model.facts,
        incarnation=incarnation,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        device=model.device.type,
        kv_dtype=kv_dtype_name(model.decoder.kv_dtype),
        kv_layout=_kv_layout(model, limits),
        attention_backend=model.decoder.attention_backend,
        attention_timings=() if layers is None else layers.attention.timings,
        gemm_choices={} if fused is None else fused.gemm_choices,
        graph_batch_sizes=runner.graph_batch_sizes,
        rank=model.decoder.group.rank,
        world_size=model.decoder.group.size,
        all_reduce=model.decoder.group.adds_up_by,
        num_host_blocks=limits.num_host_blocks,
        tiers=_tiers(runner),
        kv_layout_hash=_kv_layout_hash(model, runner),
        verifies_drafts=runner.verifies_drafts,
        encodes_pictures=(pictures := runner.state.pictures) is not None,
        keeps_pictures_whole=pictures is not None and pictures.encoder.sees_both_ways,
        has_states=model.decoder.states is not None,
        num_state_snapshots=limits.num_state_snapshots,
        kv_groups=limits.kv_groups,
        draft_model=None if model.draft is None else model.draft.facts,
        adapters=runner.state.adapters,
    )


def _tiers(runner: ModelRunner) -> tuple[TierFacts, ...]:
    sizes = {HOST_TIER: runner.limits.num_tier_blocks, DISK_TIER: runner.limits.num_disk_blocks}
    return tuple(
        TierFacts(name, sizes[name], tier.block_bytes) for name, tier in runner.tiers.items()
    )


def _kv_layout_hash(model: LoadedModel, runner: ModelRunner) -> bytes:
    if not runner.limits.has_transports:
        return b""
    group = model.decoder.group
    return layout_hash(runner.kv_cache, model.facts.config_sha256, group.rank, group.size)


def _kv_layout(model: LoadedModel, limits: Limits) -> str:
    if model.kv_plan is not None:
        return model.kv_plan.in_words(limits.num_blocks)
    return model.decoder.kv_layout(limits.num_blocks, limits.block_size)


def _candidates(
    config: WorkerConfig,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
) -> Candidates:
    def setup() -> Setup:
        capability = torch.cuda.get_device_capability(device)
        return Setup(head_dim, dtype, config.block_size, capability, kv_dtype)

    return attention.candidates(config.attention_backend, device, head_dim, setup)


def _on_cuda(decoder: StepModel) -> "FusedDecoder | ComposedStack | None":
    """The layers of ours on CUDA whose attention backends are chosen; None: there are none."""
    if not isinstance(decoder, Decoder):
        return None
    return decoder.composed if decoder.fused is None else decoder.fused


def _choose_attention(config: WorkerConfig, model: LoadedModel) -> None:
    """Must run before a graph is captured, and before the cache takes the memory it needs."""
    decoder, layers = model.decoder, _on_cuda(model.decoder)
    if layers is None:
        return
    assert isinstance(decoder, Decoder)
    triton = layers.triton
    # See `kv_groups.plan_for`.
    has_others = not decoder.spec.has_latents and model.kv_plan is None
    candidates = model.candidates if has_others else Candidates()

    def measure(kind: AttentionKind) -> Measure:
        limits = _limits(config, model, 1)
        return Clock(decoder.heads, kind, model.dtype, model.device, limits, triton).measure

    layers.attention = LayerChoices(
        {
            kind: choose(kind, triton, candidates, partial(measure, kind), decoder.group)
            for kind in dict.fromkeys(decoder.kinds)
        }
    )


def _choose_gemm_algorithms(config: WorkerConfig, model: LoadedModel, decoder: Decoder) -> None:
    """Must run before a graph is captured, and before the cache takes the memory it needs."""
    fused = decoder.fused
    if config.gemm_algorithms == "torch" or fused is None or not cublas_lt.serves(model.dtype):
        return
    from worker_svc.tuning import gemm  # noqa: PLC0415 - needs Triton

    limits = _limits(config, model, 1)
    gemm.choose(fused, model.device, limits, decoder.group)


def _choose_cluster_layers(config: WorkerConfig, model: LoadedModel, decoder: Decoder) -> None:
    """Must run before a graph is captured, and before the cache takes the memory it needs."""
    if decoder.fused is None:
        return
    from worker_svc.tuning import cluster_layers  # noqa: PLC0415 - needs Triton

    limits = _limits(config, model, 1)
    dtypes = model.dtype, decoder.kv_dtype
    cluster_layers.choose(decoder.fused, decoder.spec, model.device, dtypes, limits)


def _num_blocks_that_fit(config: WorkerConfig, model: LoadedModel) -> int:
    block_bytes = _block_bytes(config, model)
    if model.device.type == "cpu":
        gib = config.kv_cache_gib
        cache_bytes = None if gib is None else int(gib * kv_sizing.GIB)
        block_bytes *= model.decoder.group.size  # one memory holds the caches of all ranks
        return kv_sizing.num_blocks_on_cpu(cache_bytes, block_bytes, _limits(config, model, 1))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    profiled = _runner(config, model, num_blocks=1)  # the null block alone
    profiled.profile()
    torch.cuda.empty_cache()
    memory = kv_sizing.measure_cuda(model.device)
    log.info("largest step measured: %s", memory)
    utilization = config.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
    return kv_sizing.num_blocks_on_cuda(memory, utilization, block_bytes)


def _runner(
    config: WorkerConfig,
    model: LoadedModel,
    num_blocks: int,
    num_host_blocks: int = 0,
    tiers: tuple[int, int] = (0, 0),  # blocks in host memory, and on the disk
) -> ModelRunner:
    kv_cache = kv_groups.cache_for(model.decoder, model.kv_plan, num_blocks, config.block_size)
    limits = _limits(config, model, num_blocks, num_host_blocks)
    num_snapshots = _num_state_snapshots(config, model, limits.max_num_seqs)
    limits = replace(limits, num_state_snapshots=num_snapshots)
    limits = replace(limits, num_tier_blocks=tiers[0], num_disk_blocks=tiers[1])
    limits = replace(limits, has_transports=bool(config.kv_transport))
    model.decoder.make_states(limits.max_num_seqs, num_snapshots)
    grammars = _grammars(model)
    made: type[ModelRunner] = EagerRunner
    if model.decoder.stack is not None and not config.enforce_eager:
        from worker_svc.runner.cuda_runner import CudaRunner  # noqa: PLC0415 - needs Triton

        made = CudaRunner
    runner = made(model.decoder, kv_cache, limits, model.device, grammars)
    runner.state.pictures = picture_outputs(config, model.decoder, limits.max_model_len)
    if limits.num_disk_blocks:
        layout = disk_tier.layout_of(config, model.folder, model.facts, kv_cache, model.decoder)
        runner.disk_tier = disk_tier.make(config, layout, kv_cache, limits, model.device)
    if model.draft is not None:
        runner.draft_model = model.draft.for_runner(runner)
    return runner


def _grammars(model: LoadedModel) -> Grammars:
    facts = model.facts
    if not facts.tokenizer_sha256:
        return Grammars(facts.vocab_size)

    def definition() -> str:
        return (read_file(model.folder, TOKENIZER) or b"").decode()

    def read() -> Vocabulary:
        return read_vocabulary(definition(), facts.vocab_size, facts.eos_token_ids)

    source = VocabularySource(definition, facts.vocab_size, facts.eos_token_ids)
    return Grammars(facts.vocab_size, read, GrammarChecks(source))


def _limits(
    config: WorkerConfig, model: LoadedModel, num_blocks: int, num_host_blocks: int = 0
) -> Limits:
    facts, plan = model.facts, model.kv_plan
    limits = shape_limits(config, model.device.type, facts.max_model_len, facts.vocab_size)
    limits = replace(limits, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    return kv_groups.with_groups(limits, plan)


def _num_state_snapshots(config: WorkerConfig, model: LoadedModel, max_num_seqs: int) -> int:
    """The number of snapshots, which is the same on all ranks: each measures its own memory."""
    state_bytes = model.decoder.state_bytes
    if not state_bytes:
        return 0
    if config.state_snapshots is not None:
        return config.state_snapshots
    return model.decoder.group.smallest(
        lambda: kv_sizing.num_state_snapshots(state_bytes, max_num_seqs, model.device)
    )


def shape_limits(config: WorkerConfig, kind: str, max_model_len: int, vocab_size: int) -> Limits:
    """Limits without the sizes of the caches, which are not known yet; `kind` is cpu or cuda.

    A step has room for a token of each sequence: without it a scheduler would refuse the worker.
    """
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    max_num_seqs = seqs or min(MAX_NUM_SEQS[kind], tokens or MAX_NUM_BATCHED_TOKENS[kind])
    return Limits(
        num_blocks=1,
        block_size=config.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens or max(MAX_NUM_BATCHED_TOKENS[kind], max_num_seqs),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
    )


def _block_bytes(config: WorkerConfig, model: LoadedModel) -> int:
    """Bytes of a block of the model, and of the one that drafts for it: both have the same ids."""
    if model.kv_plan is not None:
        return model.kv_plan.page_bytes
    return sum(decoder.block_bytes(config.block_size) for decoder in model.decoders)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
