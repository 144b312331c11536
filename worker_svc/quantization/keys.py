"""Settings of a quantization: each key is read, or changes nothing, or is refused by name."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from worker_svc.quantization.scheme import UnsupportedQuantization

WHERE = "quantization_config"
LM_HEAD = "lm_head"


# How weights were found, by whatever writer: searches, calibration, versions, and kernels of other
# engines. None of it changes what the tensors stand for.
_SEARCHES = {
    "act_group_aware", "amp", "damp_auto_increment", "damp_percent", "enable_minmax_tuning",
    "enable_norm_bias_tuning", "enable_quanted_input", "gradient_accumulate_steps", "iters", "lr",
    "minmax_lr", "mse", "static_groups", "true_sequential",
}  # fmt: skip
_CALIBRATION = {
    "batch_size", "block_name_to_quantize", "cache_block_outputs", "dataset", "low_gpu_mem_usage",
    "max_input_length", "model_seqlen", "module_name_preceding_first_block", "nsamples",
    "pad_token_id", "quant_block_list", "seqlen", "supported_types", "to_quant_block_names",
    "tokenizer",
}  # fmt: skip
_WRITERS = {
    "auto_round_version", "autoround_version", "global_compression_ratio", "meta",
    "model_file_base_name", "model_name_or_path", "producer", "provider", "quantizer",
}  # fmt: skip
_KERNELS = {
    "backend", "dequantize", "disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len",
    "modules_to_fuse", "run_compressed", "use_cuda_fp16", "use_exllama",
    "use_optimized_inference",
}  # fmt: skip
# Types that tensors say themselves, and what is said of experts, which no served model has, and of
# activations where `act_bits` leaves them as they are.
_ELSEWHERE = {
    "act_data_type", "act_dynamic", "act_group_size", "act_sym", "expert_dtype", "scale_dtype",
    "static_attention_granularity", "static_kv_granularity",
}  # fmt: skip
PROVENANCE = frozenset(_SEARCHES | _CALIBRATION | _WRITERS | _KERNELS | _ELSEWHERE)
# What changes the output of any method, and the values that ask for nothing.
NEUTRAL: Mapping[str, Collection[Any]] = {
    "act_bits": (16, 32),
    "activation": (),
    "adapter": ({},),
    "extra_config": ({},),
    "is_marlin_format": (False,),
    "moe_sparsity_config": ({},),
    "pack_dtype": ("int32",),
    "regex_config": ({},),
    "rotation": (),
    "rotation_configs": ([],),
    "static_attention_dtype": (),
    "static_kv_dtype": (),
    "super_bits": (),
    "super_group_size": (),
}


class UnknownSetting(UnsupportedQuantization):
    """A key that may change the output; `path` is its place, from `quantization_config` on."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


def check_keys(
    where: str,
    given: Mapping[str, Any],
    read: Collection[str],
    inert: Collection[str] = (),
    neutral: Mapping[str, Collection[Any]] | None = None,
) -> None:
    """Raises UnknownSetting for a key that may change the output; null asks for nothing.

    `neutral` has values that ask for nothing, by key.
    """
    neutral = {**NEUTRAL, **(neutral or {})}
    for name, value in given.items():
        if value is None or name in read or name in inert:
            continue
        path = f"{where}.{name}"
        if name in neutral and value not in neutral[name]:
            served = " or ".join(repr(each) for each in (None, *neutral[name]))
            raise UnknownSetting(path, f"{value!r} is not supported, only {served} is")
        if name not in neutral and name not in PROVENANCE:
            raise UnknownSetting(
                path,
                "this key is not known, and it may change the output; if it does not, give "
                f"--ignore-config-keys {path}",
            )


def without(given: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """A copy that lacks the key at a path. Raises KeyError if there is none."""
    first, *rest = path
    left = dict(given)
    if rest:
        left[first] = without(left[first], rest)
    else:
        del left[first]
    return left


def one_of(
    where: str, given: Mapping[str, Any], name: str, known: Collection[Any], default: Any = None
) -> Any:
    """The value of a key; null is the default. Raises UnsupportedQuantization for any other."""
    value = given.get(name)
    value = default if value is None else value
    # True == 1, and neither may stand for the other.
    if not any(value == each and type(value) is type(each) for each in known):
        served = ", ".join(repr(each) for each in known)
        raise UnsupportedQuantization(
            f"{where}.{name}: {value!r} is not supported; supported are {served}"
        )
    return value


def flag(where: str, given: Mapping[str, Any], name: str, default: bool) -> bool:
    """A key that is true or false; null is the default."""
    return bool(one_of(where, given, name, (False, True), default))


def group_size(where: str, given: Mapping[str, Any], name: str = "group_size") -> int | None:
    """Columns that share a scale; None: all. Raises UnsupportedQuantization."""
    value = given.get(name)
    if value == -1:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedQuantization(f"{where}.{name}: {value!r} is neither positive nor -1")
    return value


def names(where: str, given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A list of names; null is an empty one."""
    value = given.get(name) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UnsupportedQuantization(f"{where}.{name}: {value!r} is not a list of names")
    return tuple(value)


def is_head(name: str) -> bool:
    """True for the head, also that of a decoder in a larger model: `language_model.lm_head`."""
    return name.rpartition(".")[2] == LM_HEAD


def is_part(name: str, patterns: Collection[str]) -> bool:
    """True if a layer is one of these, or in one: `lm_head`, `model.layers.0`, `down_proj`."""
    inside = f".{name}."
    return any(f".{pattern.strip('.')}." in inside for pattern in patterns)
