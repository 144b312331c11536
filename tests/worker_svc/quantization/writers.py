"""`quantization_config` as today's writers leave it in config.json, key by key."""

from typing import Any

Config = dict[str, Any]

# GPTQModel 7 writes the method and the format under two keys each, and what it searched with in
# `meta`.
_META = {
    "quantizer": ["gptqmodel:7.7.0"],
    "uri": "https://github.com/modelcloud/gptqmodel",
    "damp_percent": 0.05,
    "damp_auto_increment": 0.01,
    "static_groups": False,
    "true_sequential": True,
    "mse": 0.0,
    "gptaq": None,
    "foem": None,
    "act_group_aware": True,
    "fallback": {"strategy": "rtn", "threshold": "0.5%", "smooth": {"type": "mad", "k": 2.25}},
    "offload_to_disk": True,
    "offload_to_disk_path": "./gptqmodel_offload/x",
    "pack_impl": "cpu",
    "gc_mode": "interval",
    "wait_for_submodule_finalizers": False,
    "auto_forward_data_parallel": True,
    "dense_vram_strategy": "exclusive",
    "moe_vram_strategy": "exclusive",
    "preprocessors": [],
}
GPTQMODEL: Config = {
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "lm_head": False,
    "method": "gptq",
    "quant_method": "gptq",
    "format": "gptq",
    "checkpoint_format": "gptq",
    "pack_dtype": "int32",
    "meta": _META,
    "sym": True,
}
GPTQMODEL_AWQ: Config = GPTQMODEL | {
    "method": "awq",
    "quant_method": "awq",
    "format": "gemm",
    "checkpoint_format": "gemm",
    "version": "gemm",
    "zero_point": True,
}
del GPTQMODEL_AWQ["sym"]
GPTQMODEL_FP8: Config = {
    "bits": 8,
    "group_size": -1,
    "desc_act": False,
    "lm_head": False,
    "method": "fp8",
    "quant_method": "fp8",
    "format": "float8_e4m3fn",
    "checkpoint_format": "float8_e4m3fn",
    "pack_dtype": "int32",
    "meta": _META,
    "weight_scale_method": "row",
    "weight_scale_semantics": "inverse",
}
GPTQMODEL_PARO: Config = GPTQMODEL | {"method": "paroquant", "quant_method": "paroquant"}

AUTOAWQ: Config = {
    "quant_method": "awq",
    "zero_point": True,
    "group_size": 128,
    "bits": 4,
    "version": "gemm",
    "modules_to_not_convert": None,
}

# auto-round leaves out what has its default value.
_AUTO_ROUND: Config = {
    "bits": 4,
    "data_type": "int",
    "group_size": 128,
    "sym": True,
    "enable_quanted_input": False,
    "iters": 1000,
    "lr": 0.001,
    "minmax_lr": 0.002,
    "nsamples": 512,
    "seqlen": 4096,
    "batch_size": 4,
    "gradient_accumulate_steps": 2,
    "low_gpu_mem_usage": True,
    "amp": False,
    "scale_dtype": "torch.float32",
    "autoround_version": "0.16.1",
}
AUTO_ROUND_GPTQ: Config = _AUTO_ROUND | {
    "block_name_to_quantize": "model.layers",
    "lm_head": False,
    "provider": "auto-round",
    "quant_method": "gptq",
    "desc_act": False,
    "true_sequential": False,
    "damp_percent": 0.01,
}
AUTO_ROUND_AWQ: Config = _AUTO_ROUND | {
    "provider": "auto-round",
    "quant_method": "awq",
    "zero_point": False,  # of a symmetric search, whose zeros are stored all the same
    "version": "gemm",
    "modules_to_not_convert": ["lm_head"],
}
AUTO_ROUND: Config = _AUTO_ROUND | {
    "block_name_to_quantize": "model.layers",
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
}

# llm-compressor, through compressed-tensors 0.20, which leaves out arguments that are not set.
_W4A16 = {
    "targets": ["Linear"],
    "weights": {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "group_size": 128,
        "strategy": "group",
        "dynamic": False,
        "observer": "memoryless_minmax",
    },
    "input_activations": None,
    "output_activations": None,
    "format": "pack-quantized",
}
LLM_COMPRESSOR: Config = {
    "version": "0.20.0",
    "quant_method": "compressed-tensors",
    "sparsity_config": {},
    "transform_config": {},
    "config_groups": {"group_0": _W4A16},
    "kv_cache_scheme": None,
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "ignore": ["lm_head"],
    "moe_sparsity_config": None,
}
_FP8 = {
    "targets": ["Linear"],
    "weights": {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "group_size": None,
        "strategy": "channel",
        "dynamic": False,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
        "zp_dtype": "torch.float8_e4m3fn",
    },
    "input_activations": {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "group_size": None,
        "strategy": "token",
        "dynamic": True,
    },
    "output_activations": None,
    "format": "float-quantized",
}
LLM_COMPRESSOR_FP8: Config = LLM_COMPRESSOR | {
    "config_groups": {"group_0": _FP8},
    "format": "float-quantized",
}
LLM_COMPRESSOR_NVFP4: Config = LLM_COMPRESSOR | {
    "config_groups": {"group_0": _W4A16 | {"format": "nvfp4-pack-quantized"}},
    "format": "nvfp4-pack-quantized",
}
LLM_COMPRESSOR_ROTATED: Config = LLM_COMPRESSOR | {
    "transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": []}}},
}

MODELOPT: Config = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
            "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head"],
    "quant_algo": "FP8",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quant_method": "modelopt",
}
# Of bitsandbytes before transformers wrote it.
BITSANDBYTES: Config = {
    "_load_in_4bit": True,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_type": "nf4",
    "load_in_4bit": True,
    "quant_method": "bitsandbytes",
}

SERVED = {
    "gptqmodel": GPTQMODEL,
    "gptqmodel-awq": GPTQMODEL_AWQ,
    "gptqmodel-v2": GPTQMODEL | {"format": "gptq_v2", "checkpoint_format": "gptq_v2"},
    "gptqmodel-method-alone": {k: v for k, v in GPTQMODEL.items() if k != "quant_method"},
    "gptqmodel-excluded": GPTQMODEL | {"dynamic": {r"-:.*\.down_proj": {}}},
    "gptqmodel-mixed": GPTQMODEL | {"dynamic": {r"+:.*\.down_proj": {"bits": 8}}},
    "autoawq": AUTOAWQ,
    "auto-round-gptq": AUTO_ROUND_GPTQ,
    "auto-round-awq": AUTO_ROUND_AWQ,
    "auto-round-some": AUTO_ROUND_GPTQ | {"modules_in_block_to_quantize": [["mlp.down_proj"]]},
    "llm-compressor": LLM_COMPRESSOR,
    "llm-compressor-fp8": LLM_COMPRESSOR_FP8,
}
# And the one key that changes the output.
REFUSED: dict[str, tuple[Config, str]] = {
    "gptqmodel-fp8": (GPTQMODEL_FP8, "weight_scale_method"),
    "gptqmodel-planar": (GPTQMODEL | {"checkpoint_format": "gptq_p"}, "checkpoint_format"),
    "gptqmodel-two-methods": (GPTQMODEL | {"method": "awq"}, "method"),
    "gptqmodel-rotation": (GPTQMODEL | {"rotation": "hadamard"}, "rotation"),
    "gptqmodel-activation": (GPTQMODEL | {"activation": {"bits": 8}}, "activation"),
    "gptqmodel-words": (GPTQMODEL | {"pack_dtype": "int16"}, "pack_dtype"),
    "gptqmodel-3-bits": (GPTQMODEL | {"dynamic": {"x": {"bits": 3}}}, "dynamic.x.bits"),
    "gptqmodel-of-layers": (GPTQMODEL | {"dynamic": {"x": {"y": 3}}}, "dynamic.x.y"),
    "gptqmodel-pattern": (GPTQMODEL | {"dynamic": {"-:(": {}}}, "dynamic.-:("),
    "gptqmodel-paro": (GPTQMODEL_PARO, "quant_method"),
    "gemv": (AUTOAWQ | {"version": "gemv"}, "version"),
    "auto-round": (AUTO_ROUND, "quant_method"),
    "auto-round-activations": (AUTO_ROUND_GPTQ | {"act_bits": 8}, "act_bits"),
    "auto-round-cache": (AUTO_ROUND_GPTQ | {"static_kv_dtype": "fp8"}, "static_kv_dtype"),
    "auto-round-double": (AUTO_ROUND_GPTQ | {"super_bits": 6}, "super_bits"),
    "llm-compressor-nvfp4": (LLM_COMPRESSOR_NVFP4, "config_groups.group_0.format"),
    "llm-compressor-rotated": (LLM_COMPRESSOR_ROTATED, "transform_config"),
    "modelopt": (MODELOPT, "quant_method"),
    "bitsandbytes": (BITSANDBYTES, "quant_method"),
}
