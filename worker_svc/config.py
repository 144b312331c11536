"""Options of the worker, read once: command line, environment and file."""

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pagewire.hub.locate import locate
from pagewire.settings import sources
from pagewire.settings.model_folder import problem_with
from pagewire.settings.sources import comma_separated
from wire.identity.options import (
    IdentityOptions,
    add_peer_options,
    add_server_options,
    take_identity,
)
from wire.logs.setup import LoggingOptions, add_logging_options, take_logging
from wire.tracing.options import TracingOptions, add_tracing_options, take_tracing
from worker_svc.adapters.options import AdapterModule, check_modules
from worker_svc.process.disk_option import DiskTierOption
from worker_svc.process.failpoints import FAULTS_OF_CUDA, Failpoint

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "dummy")  # dummy: of config.json alone
MODEL_IMPLS = ("auto", "native", "transformers")  # auto: native where it serves the model
PICTURES = ("auto", "on", "off")  # auto: where a model that transformers computes takes them
KV_GROUPS = ("auto", "one")  # auto: by the windows of layers
# auto: what the checkpoint says. The rest rounds plain weights, or names the checkpoint's method.
QUANTIZATIONS = (
    *("auto", "fp8", "int8", "int4"),
    *("awq", "awq_marlin", "compressed-tensors", "gguf", "gptq", "gptq_marlin", "mxfp4"),
)
ALL_REDUCES = ("auto", "peer", "nccl")
ATTENTION_BACKENDS = ("auto", "triton", "flash-attn")
GEMM_ALGORITHMS = ("auto", "torch")
MAX_LORA_RANK = 512
GPU_MEMORY_UTILIZATION = 0.9  # unless told otherwise
CHOICES = {
    "dtype": DTYPES,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "device": DEVICES,
    "attention_backend": ATTENTION_BACKENDS,
    "gemm_algorithms": GEMM_ALGORITHMS,
    "load_format": LOAD_FORMATS,
    "model_impl": MODEL_IMPLS,
    "pictures": PICTURES,
    "kv_groups": KV_GROUPS,
    "quantization": QUANTIZATIONS,
    "all_reduce": ALL_REDUCES,
}

_NOT_NEGATIVE = (
    "num_kv_blocks",
    "host_blocks",
    "picture_cache_mib",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "max_loras",
    "max_cpu_loras",
    "threads",
)

# Options with an effect on one kind of device alone, and what does the same on the other.
DEVICE_OF = {
    "kv_cache_gib": "cpu",
    "gpu_memory_utilization": "cuda",
    "attention_backend": "cuda",
    "gemm_algorithms": "cuda",
    "all_reduce": "cuda",
}
HINT = {
    "kv_cache_gib": "; gpu_memory_utilization or num_kv_blocks limits its cache",
    "gpu_memory_utilization": "; kv_cache_gib or num_kv_blocks limits its cache",
}


class UnsupportedOption(ValueError):
    """An option cannot be served on this device or with this model; the message names it."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Options of one worker process. 0 or None: the device or the model determines the value."""

    model: Path | None = None
    served_model_name: str = ""
    draft_model: Path | None = None
    draft_model_name: str = ""  # what a hub calls it; empty: the folder's or the file's
    host: str = "127.0.0.1"
    port: int = 50053
    dtype: str = "auto"
    load_format: str = "auto"
    model_impl: str = "auto"
    pictures: str = "auto"
    picture_cache_mib: int = 512
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    gemm_algorithms: str = "auto"
    enforce_eager: bool = False
    block_size: int = 16
    kv_groups: str = "auto"
    num_kv_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_model_len: int = 0
    kv_cache_gib: float | None = None
    host_blocks: int = 0
    host_tier_gib: float = 0.0
    disk_tier: DiskTierOption | None = None
    kv_transport: tuple[str, ...] = ()
    kv_port: int = 0
    state_snapshots: int | None = None
    gpu_memory_utilization: float | None = None
    threads: int = 0
    tensor_parallel_size: int = 1
    step_limit_s: float | None = None  # 0: none; None: by measured step times
    rank_timeout_s: float = 5.0
    drain_timeout_s: float = 60.0
    register_at: str = ""  # host:port of a scheduler to announce this worker to
    advertise: str = ""  # host:port at which that scheduler reaches it
    all_reduce: str = "auto"
    ignore_config_keys: tuple[str, ...] = ()
    ignore_weights: tuple[str, ...] = ()
    lora_modules: tuple[AdapterModule, ...] = ()
    max_loras: int = 0
    max_lora_rank: int = 16
    max_cpu_loras: int = 0
    failpoints: tuple[Failpoint, ...] = ()
    identity: IdentityOptions = field(default_factory=IdentityOptions)
    logs: LoggingOptions = field(default_factory=LoggingOptions)
    tracing: TracingOptions = field(default_factory=TracingOptions)

    def __post_init__(self) -> None:
        self.identity.check_host(self.host)
        for name in _NOT_NEGATIVE:
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        snapshots = self.state_snapshots
        _require(snapshots is None or snapshots >= 0, "state_snapshots", snapshots, "0 or more")
        for name, known in CHOICES.items():
            value = getattr(self, name)
            _require(value in known, name, value, "one of " + ", ".join(known))
        _require(self.block_size >= 1, "block_size", self.block_size, "1 or more")
        ranks = self.tensor_parallel_size
        _require(ranks >= 1, "tensor_parallel_size", ranks, "1 or more")
        if ranks == 1:
            _require(self.all_reduce == "auto", "all_reduce", self.all_reduce, "auto for one rank")
        limit_s = self.step_limit_s
        _require(limit_s is None or limit_s >= 0, "step_limit_s", limit_s, "0 or more")
        _require(self.rank_timeout_s >= 2, "rank_timeout_s", self.rank_timeout_s, "2 or more")
        drain_s = self.drain_timeout_s
        _require(0 <= drain_s < math.inf, "drain_timeout_s", drain_s, "0 or more")
        for name in ("register_at", "advertise"):
            text, other = getattr(self, name), self.advertise or self.register_at
            _require(
                not other or _is_address(text), _OPTION[name], repr(text), "HOST:PORT, as both"
            )
        calls = self.register_at or self.kv_transport
        if self.identity.tls_ca is not None and not calls:
            raise ValueError(
                "--tls-ca needs --register or --kv-transport: the worker calls no other service"
            )
        for name in ("port", "kv_port"):
            port = getattr(self, name)
            _require(0 <= port < 65536, name, port, "0 to 65535")
        rank = self.max_lora_rank
        _require(1 <= rank <= MAX_LORA_RANK, "max_lora_rank", rank, f"1 to {MAX_LORA_RANK}")
        check_modules(self.lora_modules)
        for failpoint in self.failpoints:
            needs_cuda = failpoint.fault in FAULTS_OF_CUDA
            _require(
                not needs_cuda or self.device != "cpu",
                "device",
                self.device,
                f"cuda for failpoint {failpoint.fault.value}",
            )
        self._check_sizes()
        if self.device != "auto":
            require_device(self, self.device)

    def _check_sizes(self) -> None:
        """Refuses sizes that contradict each other, of which one would have to be ignored."""
        share, gib = self.gpu_memory_utilization, self.kv_cache_gib
        _require(share is None or 0 < share <= 1, "gpu_memory_utilization", share, "in (0, 1]")
        _require(gib is None or gib > 0, "kv_cache_gib", gib, "above 0")
        tier = self.host_tier_gib
        _require(0 <= tier < math.inf, "host_tier_gib", tier, "0 or more")
        if self.num_kv_blocks:
            for name, value in (("gpu_memory_utilization", share), ("kv_cache_gib", gib)):
                _require(value is None, name, value, "left out where num_kv_blocks is given")
            least = 1 + -(-max(1, self.max_model_len) // self.block_size)
            blocks, wanted = self.num_kv_blocks, f"{least} or more for one sequence"
            _require(blocks >= least, "num_kv_blocks", blocks, f"{wanted} of max_model_len tokens")
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        _require(
            not seqs or not tokens or seqs <= tokens,
            "max_num_batched_tokens",
            tokens,
            f"at least max_num_seqs ({seqs}): each sequence may decode a token in a step",
        )


def require_device(config: WorkerConfig, device: str) -> None:
    """Raises UnsupportedOption for an option that has no effect on this device, cpu or cuda."""
    default = WorkerConfig()
    for name, needed in DEVICE_OF.items():
        value = getattr(config, name)
        if needed != device and value != getattr(default, name):
            raise UnsupportedOption(
                f"{name}: {value} needs device {needed}, this is {device}{HINT.get(name, '')}"
            )


_OPTION = {"register_at": "register", "advertise": "advertise"}  # they go together


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 65536


def _require(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise ValueError(f"{name}: {value} must be {wanted}")


def parse(arguments: Sequence[str]) -> WorkerConfig:
    """Parses the command line; exits with a usage message if it is invalid.

    A model that a hub has and this machine has not is downloaded now. Raises ModelUnavailable.
    """
    parser = make_parser()
    options = sources.parse(parser, arguments, "worker")
    if options["model"] is not None:
        has_weights = options["load_format"] != "dummy"
        found = locate(options["model"], with_weights=has_weights)
        options["model"] = found.path
        options["served_model_name"] = options["served_model_name"] or found.name
    if options["draft_model"] is not None:
        found = locate(options["draft_model"], with_weights=True)
        options["draft_model"], options["draft_model_name"] = found.path, found.name
    for name in ("model", "draft_model"):
        path = options[name]
        if path is not None and (problem := problem_with(path)):
            parser.error(f"--{name.replace('_', '-')}: {problem}")
    try:
        options["ignore_weights"] = tuple(options["ignore_weights"])
        if options["disk_tier"] is not None:
            options["disk_tier"] = DiskTierOption.parse(options["disk_tier"])
        options["lora_modules"] = tuple(map(AdapterModule.parse, options["lora_modules"]))
        options["failpoints"] = tuple(map(Failpoint.parse, options["failpoints"]))
        options["identity"] = take_identity(options)
        options["logs"], options["tracing"] = take_logging(options), take_tracing(options)
        return WorkerConfig(**options)
    except ValueError as error:
        parser.error(str(error))


def prepare_environment() -> None:
    """Sets variables that libraries read on import; must be called before torch is imported."""
    # OpenMP threads spin for as long as a pause inside a step takes, then sleep. By default they
    # spin longer, on cores that the scheduler and the gateway need; if they slept at once, waking
    # them a hundred times a step would take a third of its time.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # flash-attn 4 compiles for seconds at its first calls and by default caches nothing on disk.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(kernel_cache() / "flash-attn"))


def kernel_cache() -> Path:
    """The folder in which compiled kernels are kept for the next start: Triton's cache."""
    named = os.environ.get("TRITON_CACHE_DIR")
    return Path(named) if named else Path("~/.triton/cache").expanduser()


def make_parser() -> argparse.ArgumentParser:
    """The parser of all options."""
    parser = argparse.ArgumentParser(
        prog="python -m worker_svc",
        description="Loads a model and computes the steps that a scheduler sends.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    sources.add_config(parser)
    add = partial(_add, parser)
    add("--model", Path, "folder, GGUF file or ORG/NAME[@REVISION] (default: wait for LoadModel)")
    add("--served-model-name", str, "name for requests; empty: ORG/NAME, or the folder's or file's")
    add(
        "--draft-model",
        Path,
        "model of the same vocabulary that drafts tokens, as --model names one; for a scheduler "
        "whose --speculative-config has method draft_model",
    )
    add("--host", str, "address to listen on")
    add("--port", int, "port to listen on, and for other ranks the ports after it; 0: any free one")
    add("--drain-timeout-s", float, "seconds that the scheduler may go on for after SIGTERM")
    _add_registration(parser)
    parser.add_argument(
        "--ignore-config-keys",
        type=comma_separated,
        default=(),
        metavar="KEY,KEY",
        help="keys of config.json to ignore although the output may then not be the model's",
    )
    parser.add_argument(
        "--ignore-weights",
        action="append",
        default=[],
        metavar="PATTERN",
        help="tensors that are no part of the model, such as v_head.*; may be repeated",
    )
    for add_some in (_add_types, _add_kernels, _add_sizes, _add_adapters, _add_rank_options):
        add_some(parser)
    _add_common_options(parser)
    parser.add_argument(
        "--failpoint",
        dest="failpoints",
        action="append",
        default=[],
        metavar="NAME@COUNT",
        help="for tests: a fault to inject once; may be repeated; see docs/failures.md",
    )
    return parser


def _add(
    parser: argparse.ArgumentParser,
    option: str,
    kind: type,
    text: str,
    choices: Sequence[str] | None = None,
) -> None:
    default = getattr(WorkerConfig(), option.removeprefix("--").replace("-", "_"))
    parser.add_argument(option, type=kind, default=default, choices=choices, help=text)


def _add_common_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that all services have."""
    add_server_options(parser)
    add_peer_options(parser, serves=True, calls=True)
    add_logging_options(parser)
    add_tracing_options(parser)


def _add_registration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--register",
        dest="register_at",
        default="",
        metavar="HOST:PORT",
        help="announce this worker to the scheduler there (its --accept-registrations), with "
        "--advertise",
    )
    parser.add_argument(
        "--advertise",
        default="",
        metavar="HOST:PORT",
        help="the address at which that scheduler reaches this worker",
    )


def _add_types(parser: argparse.ArgumentParser) -> None:
    add = partial(_add, parser)
    add("--dtype", str, "type of weights and activations", DTYPES)
    add(
        "--kv-cache-dtype",
        str,
        "type of the KV cache; auto: the model's, or what the checkpoint has scales for; fp8: "
        "fp8_e4m3, half of the memory",
        KV_CACHE_DTYPES,
    )
    add(
        "--load-format",
        str,
        "auto: the model's files; dummy: random weights, made on the device of its config.json "
        "alone, to measure speed",
        LOAD_FORMATS,
    )
    add(
        "--model-impl",
        str,
        "native: layers of pagewire; transformers: the library's, which serves more models and is "
        "slower; auto: native where it serves the model",
        MODEL_IMPLS,
    )
    add(
        "--pictures",
        str,
        "on: pictures in prompts, by --model-impl transformers; off: text alone; auto: on where "
        "transformers computes the model on a cpu",
        PICTURES,
    )
    add(
        "--quantization",
        str,
        "auto: as the checkpoint is; fp8, int8, int4: plain weights are rounded while they are "
        "loaded; the checkpoint's own method may be named",
        QUANTIZATIONS,
    )


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    add = partial(_add, parser)
    add("--device", str, "device to compute on", DEVICES)
    add(
        "--attention-backend",
        str,
        "attention kernels on cuda; auto: the fastest installed, measured at start",
        ATTENTION_BACKENDS,
    )
    add(
        "--gemm-algorithms",
        str,
        "how cuBLAS algorithms are chosen on cuda; auto: the fastest, measured at start",
        GEMM_ALGORITHMS,
    )
    parser.add_argument(
        "--enforce-eager",
        action="store_true",
        help="record no CUDA graphs: each step is launched kernel by kernel, as on cpu; starts "
        "sooner and is slower",
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    add = partial(_add, parser)
    add("--block-size", int, "tokens per KV block")
    add(
        "--kv-groups",
        str,
        "auto: layers with windows keep the tokens of their window; one: all layers keep all",
        KV_GROUPS,
    )
    add("--num-kv-blocks", int, "KV blocks, including the null block; 0: as many as fit")
    add(
        "--max-num-seqs",
        int,
        "maximum number of running sequences; 0: 64 on cpu, 256 on cuda, "
        "or max_num_batched_tokens if that is less",
    )
    add(
        "--max-num-batched-tokens",
        int,
        "maximum tokens per step; 0: 512 on cpu, 8192 on cuda, or max_num_seqs if that is more",
    )
    add("--max-model-len", int, "maximum tokens of prompt plus output; 0: the model's own limit")
    add("--kv-cache-gib", float, "KV cache on cpu, GiB; None: up to 4 or a quarter of free memory")
    add("--picture-cache-mib", int, "MiB in which what the encoder made of pictures is kept")
    add(
        "--state-snapshots",
        int,
        "snapshots of recurrent states, for the prefix cache of models that have some; 0: none; "
        "None: two a sequence, in up to a tenth of memory",
    )
    add(
        "--gpu-memory-utilization",
        float,
        f"fraction of a cuda device's memory to use, 0 to 1; None: {GPU_MEMORY_UTILIZATION}",
    )
    add("--threads", int, "torch threads per process on cpu; 0: all cores, divided among the ranks")
    _add_more_kv(parser)


def _add_more_kv(parser: argparse.ArgumentParser) -> None:
    """Adds where KV is kept, or comes from, besides the cache."""
    add = partial(_add, parser)
    add("--host-blocks", int, "KV blocks in host memory for preemption by swap; 0: none")
    add(
        "--host-tier-gib",
        float,
        "GiB of host memory in which prompts' KV is kept after the cache has dropped it; 0: none",
    )
    add(
        "--disk-tier",
        str,
        "PATH:GIB, a folder and its room, in which prompts' KV is kept across restarts; None: none",
    )
    parser.add_argument(
        "--kv-transport",
        type=comma_separated,
        default=(),
        metavar="NAME,NAME",
        help="ways by which KV moves between workers: tcp, or a plug-in's",
    )
    add("--kv-port", int, "port at which other workers read KV by tcp; 0: any free one")


def _add_adapters(parser: argparse.ArgumentParser) -> None:
    add = partial(_add, parser)
    parser.add_argument(
        "--lora-modules",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help='LoRA adapters to serve as models, in folders of PEFT\'s format, or as {"name": NAME, '
        '"path": PATH}; may be repeated',
    )
    add("--max-loras", int, "adapters that the rows of a step may have; 0: 8 with --lora-modules")
    add("--max-lora-rank", int, "largest rank of an adapter")
    add("--max-cpu-loras", int, "adapters kept in host memory; 0: 32, or max-loras if that is more")


def _add_rank_options(parser: argparse.ArgumentParser) -> None:
    add = partial(_add, parser)
    add(
        "--tensor-parallel-size",
        int,
        "ranks that share the model, each a process with its own device",
    )
    add(
        "--step-limit-s",
        float,
        "seconds after which a step ends the process (exit code 72); 0: no limit; None: 30 times "
        "the time of such steps on this machine, at least 60 s on cuda and 300 s on cpu",
    )
    add(
        "--rank-timeout-s",
        float,
        "seconds without a heartbeat after which a rank ends its group; up to five times as long "
        "where heartbeats are late",
    )
    add(
        "--all-reduce",
        str,
        "all-reduce on cuda; auto, peer: own kernel for small tensors; nccl: NCCL",
        ALL_REDUCES,
    )
