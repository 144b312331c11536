"""Options and variables of other engines: what each asks for here.

What asks for nothing, since it is so anyway, is taken with a line that says so. All else is refused
with the option that does the same, or with the reason why there is none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OtherOption:
    """An option of other engines: what is so here, and the values that ask for just that."""

    answer: str
    neutral: tuple[str, ...] = ()  # "": the option is a switch

    @property
    def is_switch(self) -> bool:
        """True if it has no value."""
        return "" in self.neutral


_CHUNKS = "prompts are cut to the budget of a step, which --max-num-batched-tokens sets"
_RANKS = "ranks are processes of one host, one alone is the worker's own"
_TOKENIZER = "the tokenizer is the one in the model's folder or GGUF file"
_CODE = "no code of a checkpoint is run, and none is needed by the families in docs/models.md"
_COMPILED = "kernels are compiled at the first start and kept; torch compiles no model here"
_PREFIXES = "prefixes are cached unless --no-prefix-caching is given"

OPTIONS: dict[str, OtherOption] = {
    "tokenizer": OtherOption(f"{_TOKENIZER}; put another one there"),
    "tokenizer-mode": OtherOption(f"{_TOKENIZER}, and its file says of which kind", ("auto",)),
    "tokenizer-revision": OtherOption(f"{_TOKENIZER}, of --model ORG/NAME@REVISION"),
    "revision": OtherOption("write --model ORG/NAME@REVISION"),
    "code-revision": OtherOption(_CODE),
    "hf-overrides": OtherOption(
        "config.json is read as it stands; change it in a copy of the folder, or let a key through "
        "with --ignore-config-keys",
        ("{}",),
    ),
    "trust-remote-code": OtherOption(_CODE, ("",)),
    "enable-chunked-prefill": OtherOption(_CHUNKS, ("",)),
    "no-enable-chunked-prefill": OtherOption(
        f"{_CHUNKS}: whole ones would keep running requests waiting. --target-itl-ms and "
        "--long-prefill-token-threshold bound a piece"
    ),
    "enable-prefix-caching": OtherOption(_PREFIXES, ("",)),
    "no-enable-prefix-caching": OtherOption("write --no-prefix-caching"),
    "distributed-executor-backend": OtherOption(
        f"{_RANKS}; choices are mp and uni. There is no ray: a host has its own workers, which a "
        "scheduler finds by --worker, --worker-dns or --accept-registrations",
        ("mp", "uni"),
    ),
    "pipeline-parallel-size": OtherOption(
        "layers are not divided over devices; --tensor-parallel-size divides each", ("1",)
    ),
    "data-parallel-size": OtherOption(
        "replicas are workers of their own: give the scheduler --worker for each", ("1",)
    ),
    "enable-expert-parallel": OtherOption("experts are divided by --tensor-parallel-size"),
    "compilation-config": OtherOption(_COMPILED, ("0", "{}")),
    "compilation-level": OtherOption(_COMPILED, ("0",)),
    "float32-matmul-precision": OtherOption(
        "float32 is computed in float32; --dtype bfloat16 is faster", ("highest",)
    ),
    "max-seq-len-to-capture": OtherOption("graphs hold any length; --enforce-eager records none"),
    "swap-space": OtherOption(
        "write --host-blocks (of the worker) and --preemption swap (of the scheduler)", ("0",)
    ),
    "cpu-offload-gb": OtherOption(
        "weights stay on the device; --quantization makes them smaller", ("0",)
    ),
    "num-gpu-blocks-override": OtherOption("write --num-kv-blocks"),
    "scheduling-policy": OtherOption("write --policy fcfs, priority or fair", ("fcfs",)),
    "seed": OtherOption("a request has its own seed", ("0",)),
    "port": OtherOption("write --http-port and --grpc-port"),
    "allowed-origins": OtherOption("write --cors-origins"),
    "ssl-certfile": OtherOption("write --tls, or --tls-cert of each service"),
    "ssl-keyfile": OtherOption("write --tls, or --tls-key of each service"),
    "otlp-traces-endpoint": OtherOption("write --otlp-endpoint"),
    "disable-custom-all-reduce": OtherOption("write --all-reduce nccl (worker)"),
    "enable-lora": OtherOption("--lora-modules and --max-loras of the worker say so", ("",)),
    "enable-auto-tool-choice": OtherOption("models choose tools where requests allow it", ("",)),
    "disable-log-requests": OtherOption("prompts and outputs never reach a log", ("",)),
    "no-enable-log-requests": OtherOption("prompts and outputs never reach a log", ("",)),
    "guided-decoding-backend": OtherOption(
        "llguidance holds all forms", ("auto", "llguidance", "guidance")
    ),
}

VARIABLES = {
    "VLLM_API_KEY": "PAGEWIRE_API_KEY is the key that clients need",
    "VLLM_ATTENTION_BACKEND": "--attention-backend chooses the kernels",
    "VLLM_FLOAT32_MATMUL_PRECISION": OPTIONS["float32-matmul-precision"].answer,
    "VLLM_LOGGING_LEVEL": "--log-level is the least level of a line",
    "VLLM_LOG_SCHEDULER": "--log-steps logs a line for each step",
    "VLLM_TRACE_FUNCTION": "no calls are traced; `pagewire profile` records a step's parts, "
    "--otlp-endpoint the spans of requests",
}


def without_neutral(typed: Sequence[str], own: frozenset[str]) -> tuple[list[str], list[str]]:
    """The words without options that ask for nothing, and a line about each of these.

    `own` are the command's own options, which mean what it says.
    """
    kept: list[str] = []
    lines: list[str] = []
    words = iter(typed)
    for word in words:
        name, has_value, value = word.removeprefix("--").partition("=")
        other = OPTIONS.get(name) if word.startswith("--") and name not in own else None
        if other is None:
            kept.append(word)
            continue
        given = [word]
        if not has_value and not other.is_switch and (following := next(words, None)) is not None:
            value = following
            given.append(following)
        if value in other.neutral:
            lines.append(f"--{name} asks for nothing: {other.answer}")
        else:
            kept += given
    return kept, lines


def answers(words: Sequence[str]) -> Iterator[str]:
    """The answer to each option of other engines among the words that a parser left over."""
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and name in OPTIONS:
            yield f"--{name}: {OPTIONS[name].answer}"


def variables(environ: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable of other engines that is set."""
    for name, answer in VARIABLES.items():
        if environ.get(name):
            yield f"{name} sets nothing here: {answer}"
