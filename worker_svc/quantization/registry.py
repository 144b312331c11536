"""Methods of quantization by the name that a checkpoint gives; others are refused by name.

An installed package adds one by an entry point of the group `pagewire.quantizations`, which is
named as the checkpoint's `quant_method` and leads to a `Reader`.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from wire import plug_ins
from worker_svc.quantization.awq import Awq
from worker_svc.quantization.compressed import Compressed
from worker_svc.quantization.float8 import Float8, Float8Scheme
from worker_svc.quantization.gguf import GgufTypes
from worker_svc.quantization.gptq import Gptq
from worker_svc.quantization.keys import WHERE, UnknownSetting, without
from worker_svc.quantization.mxfp4 import Mxfp4
from worker_svc.quantization.online import ONLINE, Online, RoundedFloat8
from worker_svc.quantization.scheme import (
    PLAIN,
    Quantization,
    Scheme,
    UnsupportedQuantization,
)

log = logging.getLogger(__name__)

PLUG_INS = "pagewire.quantizations"
Reader = Callable[[Mapping[str, Any]], Quantization]

METHODS: dict[str, Reader] = {
    "awq": Awq.of,
    "compressed-tensors": Compressed.of,
    "fp8": Float8.of,
    "gptq": Gptq.of,
    "mxfp4": Mxfp4.of,
}


# Names by which a checkpoint's own method may be asked for: those of kernels of other engines, too.
STORED: dict[str, type[Quantization]] = {
    "awq": Awq,
    "awq_marlin": Awq,
    "compressed-tensors": Compressed,
    "fp8": Float8,
    "gguf": GgufTypes,
    "gptq": Gptq,
    "gptq_marlin": Gptq,
    "mxfp4": Mxfp4,
}


def of_checkpoint(
    given: object, methods: Mapping[str, Reader] = METHODS, ignored: Collection[str] = ()
) -> Quantization | None:
    """The quantization of `quantization_config`; None: nothing. Raises UnsupportedQuantization.

    Keys that would be refused for what they may change are left out where `ignored` has their
    path, `quantization_config.` and so on, with a warning in the log.
    """
    if given is None or given == {}:
        return None
    if not isinstance(given, dict):
        raise UnsupportedQuantization(f"{WHERE}: {given!r} is not an object")
    read = _reader(given, methods)
    while True:
        try:
            return read(given)
        except UnknownSetting as error:
            if error.path not in ignored:
                raise
            log.warning("config.json: %s is ignored: the output may not be the model's", error.path)
            given = _without(given, error)


def _without(given: Mapping[str, Any], refused: UnknownSetting) -> dict[str, Any]:
    """The settings without a key. Raises the refusal if a name on the way to it has a dot."""
    try:
        return without(given, refused.path.split(".")[1:])
    except (KeyError, TypeError):
        raise refused from None


def _reader(given: Mapping[str, Any], methods: Mapping[str, Reader]) -> Reader:
    """The reader of a method's settings, which a plug-in may be. Raises UnsupportedQuantization."""
    method = _method(given)
    if isinstance(method, str) and method in methods:
        return methods[method]
    try:
        found = plug_ins.find(PLUG_INS, method) if isinstance(method, str) else None
    except plug_ins.BadPlugIn as error:
        raise UnsupportedQuantization(f"{WHERE}.quant_method: {error}") from error
    if found is None:
        supported = ", ".join((*methods, *plug_ins.names(PLUG_INS)))
        raise UnsupportedQuantization(
            f"{WHERE}.quant_method: {method!r} is not supported; supported are {supported}"
        )
    if not callable(found.value):
        raise UnsupportedQuantization(
            f"{WHERE}.quant_method: the plug-in {found.place} for {method} reads no settings"
        )
    return found.value


def _method(given: Mapping[str, Any]) -> object:
    """The method by its name, which a writer may give under two keys."""
    named = given.get("quant_method")
    other = given.get("method")
    found = other if named is None else named
    if other is not None and other != found:
        raise UnsupportedQuantization(f"{WHERE}.method: {other!r} is not quant_method, {found!r}")
    return found


def serves_experts(scheme: Scheme) -> bool:
    """True if experts that are stored so are served: as plain numbers, or in 8-bit floats."""
    return scheme is PLAIN or isinstance(scheme, Float8Scheme | RoundedFloat8)


def is_float8(quantization: Quantization) -> bool:
    """True if all layers have 8-bit floats or plain numbers."""
    match quantization:
        case Online(layer=scheme):
            return serves_experts(scheme)
        case Compressed(groups=groups):
            return all(serves_experts(scheme) for _, scheme in groups)
    return isinstance(quantization, Float8)


def stored_kv_cache_dtype(checkpoint: Quantization | None) -> str | None:
    """The option's value for the KV cache that a checkpoint has scales for; None: it has none."""
    return checkpoint.kv_cache_dtype if isinstance(checkpoint, Compressed) else None


def chosen(name: str, checkpoint: Quantization | None) -> Quantization | None:
    """The quantization for an option's value: `auto`, the checkpoint's own, or one at load.

    Raises UnsupportedQuantization.
    """
    if name == "auto" or (name in STORED and isinstance(checkpoint, STORED[name])):
        return checkpoint
    if name not in ONLINE:
        if name in STORED:
            found = "plain weights" if checkpoint is None else checkpoint.label
            raise UnsupportedQuantization(f"quantization: {name}, but the checkpoint has {found}")
        supported = ", ".join({**ONLINE, **STORED})
        raise UnsupportedQuantization(
            f"quantization: {name!r} is not supported; supported are auto, {supported}"
        )
    if checkpoint is not None:
        raise UnsupportedQuantization(
            f"quantization: {name} rounds plain weights; these are quantized already "
            f"({checkpoint.label}), so leave it out"
        )
    return ONLINE[name]
