"""The adapters of a worker that starts: which models have some, and those that are named then."""

import logging

from worker_svc.adapters.options import AdapterModule
from worker_svc.adapters.reading import AdapterReader
from worker_svc.adapters.store import AdapterLimits, AdapterStore
from worker_svc.config import UnsupportedOption, WorkerConfig
from worker_svc.models import Decoder
from worker_svc.models.step_model import StepModel
from worker_svc.startup.kv_sizing import GIB

MAX_LORAS = 8  # where --lora-modules names adapters and --max-loras does not say
MAX_CPU_LORAS = 32

log = logging.getLogger(__name__)


def limits_of(config: WorkerConfig) -> AdapterLimits | None:
    """The limits of adapters; None: none are served."""
    max_loras = config.max_loras or (MAX_LORAS if config.lora_modules else 0)
    if not max_loras:
        return None
    max_cpu = config.max_cpu_loras or max(MAX_CPU_LORAS, max_loras)
    if max_cpu < max_loras:
        raise UnsupportedOption(f"max_cpu_loras: {max_cpu} is below max_loras, {max_loras}")
    return AdapterLimits(max_loras, config.max_lora_rank, max_cpu)


def require_adaptable(config: WorkerConfig, device: str) -> None:
    """Raises UnsupportedOption, before weights are read, where ranks cannot have adapters."""
    if limits_of(config) is None or device == "cpu" or config.tensor_parallel_size == 1:
        return
    raise UnsupportedOption(
        f"{_asked_by(config)}: adapters on {device} need tensor_parallel_size 1"
    )


def store_for(config: WorkerConfig, model: StepModel) -> AdapterStore | None:
    """The adapters of this worker, with those of --lora-modules in memory; None: it has none.

    Raises UnsupportedOption for a model that takes none, and BadAdapter for one that is not for it.
    """
    limits = limits_of(config)
    if limits is None:
        return None
    if not isinstance(model, Decoder) or not model.adaptable.targets:
        raise UnsupportedOption(
            f"{_asked_by(config)}: adapters need layers of pagewire with attention or an MLP, "
            "which this model is not computed by"
        )
    if model.device.type == "cpu":
        layers = model.adaptable
        reader = AdapterReader(layers.targets, limits.max_rank, layers.dtype, layers.pack)
        store = AdapterStore(reader, limits, layers.take())
    else:
        store = _on_device(config, model, limits)
    if model.group.rank == 0:
        for module in config.lora_modules:
            _load(store, module)
    return store


def _on_device(config: WorkerConfig, model: Decoder, limits: AdapterLimits) -> AdapterStore:
    """The same with memory on the device, which is taken here."""
    device = model.adapt(limits.max_loras, limits.max_rank)
    if device is None:
        raise UnsupportedOption(
            f"{_asked_by(config)}: torch computes this model's layers on {model.device.type}, "
            "and adapters need kernels there"
        )
    log.info(
        "adapters: %d places of rank %d take %.2f GiB",
        limits.max_loras,
        limits.max_rank,
        device.size_bytes / GIB,
    )
    reader = AdapterReader(
        model.adaptable.targets, limits.max_rank, device.layout.dtype, layout=device.layout
    )
    return AdapterStore(reader, limits, device=device)


def _load(store: AdapterStore, module: AdapterModule) -> None:
    try:
        store.names.load(module.name, module.path)
    except ValueError as error:
        raise UnsupportedOption(f"lora_modules: {module.name}: {error}") from error


def _asked_by(config: WorkerConfig) -> str:
    return "max_loras" if config.max_loras else "lora_modules"
