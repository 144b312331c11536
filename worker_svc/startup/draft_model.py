"""Loads the model that drafts for another: a smaller one of the same vocabulary."""

import logging
from dataclasses import dataclass
from pathlib import Path

from kernels import fp8
from worker_svc.attention.kv_cache import KVCache
from worker_svc.config import UnsupportedOption, WorkerConfig
from worker_svc.models import DUMMY, Decoder, load_model
from worker_svc.models import config as model_config
from worker_svc.models.spec import ModelSpec
from worker_svc.runner.draft_model import DraftModel
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import kv_scales
from worker_svc.startup.description import ModelFacts, facts_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model in memory, without a cache, and its facts."""

    decoder: Decoder
    facts: ModelFacts

    def for_runner(self, runner: ModelRunner) -> DraftModel:
        """The model with an empty cache of as many blocks as the runner's."""
        limits = runner.limits
        cache = self.decoder.new_cache(limits.num_blocks, limits.block_size)
        assert isinstance(cache, KVCache)  # models with another kind are refused
        if self.decoder.fused is None or not runner.is_asynchronous:
            return DraftModel(self.decoder, cache, limits)
        from worker_svc.runner.cuda_draft_model import CudaDraftModel  # noqa: PLC0415 - needs Triton

        return CudaDraftModel(self.decoder, cache, limits, runner.state)


def load(config: WorkerConfig, target: ModelFacts, model: Decoder) -> LoadedDraft:
    """Reads the model of --draft-model, or a rank's shard, in the types of the model served.

    Raises UnsupportedOption, naming what does not fit.
    """
    folder = config.draft_model
    assert folder is not None
    shape = model_config.load(folder, config.ignore_config_keys)
    _check(folder, shape, target)
    log.info("loading draft model %s", folder)
    decoder = load_model(
        folder,
        model.dtype,
        model.device,
        target.max_model_len,
        model.group,
        config.ignore_config_keys,
        kv_dtype=model.kv_dtype,
        ignored_weights=config.ignore_weights,
        load_format=config.load_format,
    )
    if fp8.is_fp8(model.kv_dtype):
        has_files = config.load_format != DUMMY
        decoder.kv_scales = kv_scales.read(
            folder, decoder.sharding, model.device, has_files=has_files
        )
    name = config.draft_model_name
    facts = facts_of(shape, folder, name, model.dtype, target.max_model_len)
    return LoadedDraft(decoder, facts)


def _check(folder: Path, shape: ModelSpec, target: ModelFacts) -> None:
    if shape.has_states:
        raise UnsupportedOption(
            f"draft_model: {folder} has states of sequences, which do not go back to the last "
            "token accepted"
        )
    if shape.has_latents:
        raise UnsupportedOption(f"draft_model: {folder} has a cache of latents, which do not draft")
    if not shape.has_one_attention:
        raise UnsupportedOption(
            f"draft_model: {folder} has heads of several sizes in its cache, which do not draft"
        )
    if shape.vocab_size != target.vocab_size:
        raise UnsupportedOption(
            f"draft_model: {folder} has vocab_size {shape.vocab_size}, the model served "
            f"{target.vocab_size}: a draft model has the same vocabulary"
        )
    if shape.max_model_len < target.max_model_len:
        raise UnsupportedOption(
            f"draft_model: {folder} has max_model_len {shape.max_model_len}, the model served "
            f"{target.max_model_len}: lower --max-model-len"
        )
