"""Methods of quantization by the name that a checkpoint gives; others are refused by name."""

from collections.abc import Callable, Mapping
from typing import Any

from worker_svc.quantization.awq import Awq
from worker_svc.quantization.compressed import Compressed
from worker_svc.quantization.float8 import Float8
from worker_svc.quantization.gptq import Gptq
from worker_svc.quantization.keys import WHERE
from worker_svc.quantization.online import ONLINE
from worker_svc.quantization.scheme import Quantization, UnsupportedQuantization

Reader = Callable[[Mapping[str, Any]], Quantization]

METHODS: dict[str, Reader] = {
    "awq": Awq.of,
    "compressed-tensors": Compressed.of,
    "fp8": Float8.of,
    "gptq": Gptq.of,
}


def of_checkpoint(given: object, methods: Mapping[str, Reader] = METHODS) -> Quantization | None:
    """What `quantization_config` asks for; None: nothing. Raises UnsupportedQuantization."""
    if given is None or given == {}:
        return None
    if not isinstance(given, dict):
        raise UnsupportedQuantization(f"{WHERE}: {given!r} is not an object")
    method = given.get("quant_method")
    if not isinstance(method, str) or method not in methods:
        raise UnsupportedQuantization(
            f"{WHERE}.quant_method: {method!r} is not supported; supported are {', '.join(methods)}"
        )
    return methods[method](given)


def stored_kv_cache_dtype(checkpoint: Quantization | None) -> str | None:
    """The option's value for the KV cache that a checkpoint has scales for; None: it has none."""
    return checkpoint.kv_cache_dtype if isinstance(checkpoint, Compressed) else None


def chosen(name: str, checkpoint: Quantization | None) -> Quantization | None:
    """The quantization for an option's value, `auto` or a name. Raises UnsupportedQuantization."""
    if name == "auto":
        return checkpoint
    if name not in ONLINE:
        raise UnsupportedQuantization(
            f"quantization: {name!r} is not supported; supported are auto, {', '.join(ONLINE)}"
        )
    if checkpoint is not None:
        raise UnsupportedQuantization(
            f"quantization: {name} rounds plain weights; these are quantized already "
            f"({checkpoint.label}), so leave it out"
        )
    return ONLINE[name]
