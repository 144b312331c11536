"""The options of `pagewire up`, and which service each is passed on to.

What services have in common or users set often is an option of `up` itself. Every other option of
a service goes through --worker-options=, --scheduler-options= or --gateway-options=.
"""

import argparse
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pagewire.cli.checkout import HERE
from pagewire.settings import other_engines
from pagewire.settings.known import OPTIONS
from pagewire.settings.sources import add_config

SERVICES = ("worker", "scheduler", "gateway")


@dataclass(frozen=True, slots=True)
class Passed:
    """An option that `up` passes on as it is to one service."""

    name: str  # without dashes
    service: str
    help: str
    metavar: str | None = None  # None: a switch without a value
    kind: Callable[[str], Any] = str
    repeats: bool = False


def _template(text: str) -> Path | str:
    """A file, or one of the names that the gateway knows."""
    return text if text == "deepseek_v32" else Path(text)


def _adapter(text: str) -> str:
    """NAME=PATH with an absolute path, if it is one: the services run in another folder."""
    name, found, path = text.partition("=")
    if not found or text.startswith("{") or not Path(path).exists():
        return text
    return f"{name}={Path(path).absolute()}"


def _word_or_folder(text: str) -> Path | str:
    """auto and none are words, all else is a path."""
    return text if text in ("auto", "none") else Path(text)


PASSED = (
    Passed("served-model-name", "worker", "name of the model for requests", "NAME"),
    Passed("threads", "worker", "threads on cpu", "N", int),
    Passed("block-size", "worker", "tokens per KV block", "N", int),
    Passed("kv-cache-gib", "worker", "KV cache on cpu, in GiB", "GIB", float),
    Passed("kv-cache-dtype", "worker", "type of the KV cache: auto, fp8_e4m3, fp8_e5m2", "TYPE"),
    Passed("gpu-memory-utilization", "worker", "share of a GPU's memory, 0 to 1", "SHARE", float),
    Passed("ignore-config-keys", "worker", "keys of config.json to ignore", "KEY,KEY"),
    Passed(
        "ignore-weights",
        "worker",
        "tensors that are no part of the model, such as v_head.*; may be repeated",
        "PATTERN",
        repeats=True,
    ),
    Passed(
        "lora-modules",
        "worker",
        "LoRA adapters to serve as models; several words, or repeated",
        "NAME=PATH",
        _adapter,
        repeats=True,
    ),
    Passed("max-loras", "worker", "adapters that the rows of a step may have", "N", int),
    Passed("max-lora-rank", "worker", "largest rank of an adapter", "N", int),
    Passed("max-cpu-loras", "worker", "adapters kept in host memory", "N", int),
    Passed(
        "quantization",
        "worker",
        "fp8, int8 or int4: round plain weights at load; or the checkpoint's own method",
        "NAME",
    ),
    Passed("enforce-eager", "worker", "record no CUDA graphs"),
    Passed(
        "speculative-config",
        "scheduler",
        "what drafts tokens, to verify several in a step; the worker loads a draft model of it",
        "JSON",
    ),
    Passed(
        "kv-events-config",
        "scheduler",
        "publish which blocks the prefix caches hold, over ZMQ, for routers",
        "JSON",
    ),
    Passed("policy", "scheduler", "order of the queue: fcfs, priority or fair", "NAME"),
    Passed("max-waiting-requests", "scheduler", "most waiting requests; 0: no limit", "N", int),
    Passed("no-prefix-caching", "scheduler", "compute every prompt in full"),
    Passed("target-itl-ms", "scheduler", "time between tokens to keep", "MS", float),
    Passed("log-steps", "scheduler", "log one line for each step"),
    Passed("record", "scheduler", "record every decision, for `pagewire replay`", "DIR", Path),
    Passed(
        "chat-template",
        "gateway",
        "Jinja template of chats, or the name of one of ours",
        "FILE|deepseek_v32",
        _template,
    ),
    Passed("text-contents", "gateway", "encode the contents of chats as text"),
    Passed(
        "generation-config",
        "gateway",
        "whose generation_config.json sets the sampling defaults",
        "auto|none|FOLDER",
        _word_or_folder,
    ),
    Passed("tool-call-parser", "gateway", "format of the model's tool calls", "NAME"),
    Passed("reasoning-parser", "gateway", "format of the model's reasoning", "NAME"),
    Passed("no-page", "gateway", "no page at /"),
    Passed("cors-origins", "gateway", "pages of these may call from a browser", "ORIGIN,ORIGIN"),
    Passed("strict-requests", "gateway", "refuse fields that are not known"),
    Passed("allow-runtime-lora-updating", "gateway", "adapters may be loaded and unloaded"),
    Passed("store-responses", "gateway", "memory for stored responses", "MIB", int),
)

TO_ALL = (  # each service is told the same
    Passed("log-format", "all", "lines of the logs: text or json", "NAME"),
    Passed("log-level", "all", "least level: debug, info, warning or error", "NAME"),
    Passed("otlp-endpoint", "all", "send traces to this OTLP collector, by gRPC", "URL"),
    Passed("trace-sample-ratio", "all", "share of the requests to trace, 0 to 1", "SHARE", float),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds all options."""
    add = parser.add_argument
    add_config(parser)
    add(
        "--model",
        type=Path,
        metavar="MODEL",
        help="model folder, GGUF file, or ORG/NAME[@REVISION] of a hub (default: the embedded one)",
    )
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="type of weights and activations (default: auto)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), help="device to compute on (default: auto)")
    add(
        "--attention-backend",
        choices=("auto", "triton", "flash-attn"),
        help="attention kernels on cuda; auto: the fastest that is installed (default: auto)",
    )
    add("--host", default="127.0.0.1", help="address the gateway listens on")
    add("--http-port", type=int, default=8000, help="OpenAI-compatible API")
    add("--grpc-port", type=int, default=50051, help="gRPC API")
    add("--scheduler-port", type=int, default=50052, help="scheduler, on 127.0.0.1")
    add("--worker-port", type=int, default=50053, help="worker, on 127.0.0.1")
    add("--max-num-seqs", type=int, metavar="N", help="most running requests")
    add("--max-num-batched-tokens", type=int, metavar="N", help="most tokens per step")
    add("--max-model-len", type=int, metavar="N", help="most tokens of prompt plus output")
    add("--num-kv-blocks", type=int, metavar="N", help="blocks of the KV cache")
    add("--tensor-parallel-size", type=int, metavar="N", help="GPUs that share the model")
    _add_passed(parser)
    add("--tls", action="store_true", help="TLS on all ports, with test certificates made at start")
    add("--api-key", metavar="KEY", help="the one key that clients need")
    add("--api-keys", type=Path, metavar="FILE", help="API keys, from `pagewire keys new`")
    add("--once", action="store_true", help="stop after the sample answer")
    add("--demo", action="store_true", help="the page can kill the worker, to show the recovery")
    add("--no-sample", action="store_true", help="do not ask the sample question")
    _add_limits(parser)
    add("--log-dir", type=Path, metavar="DIR", help="folder for logs (default: a new one)")
    add("--checkout", type=Path, default=HERE, metavar="DIR", help="folder with the services' code")


def _add_passed(parser: argparse.ArgumentParser) -> None:
    for option in (*PASSED, *TO_ALL):
        whose = "all services" if option in TO_ALL else f"the {option.service}"
        text = f"{option.help} (of {whose})"
        if option.metavar is None:
            parser.add_argument(f"--{option.name}", action="store_true", help=text)
            continue
        parser.add_argument(
            f"--{option.name}",
            action="extend" if option.repeats else "store",
            nargs="+" if option.repeats else None,
            type=option.kind,
            metavar=option.metavar,
            help=text,
        )
    for service in SERVICES:
        parser.add_argument(
            f"--{service}-options",
            type=words,
            default=(),
            metavar="WORDS",
            help=f"further options of the {service}, split as by a shell; write =WORDS",
        )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--startup-timeout-s",
        type=float,
        default=900.0,
        help="seconds after which to give up on a service that is not ready and has logged nothing "
        "new, and on the sample answer",
    )
    add(
        "--drain-timeout-s",
        type=seconds,
        default=60.0,
        help="seconds that running requests have after SIGTERM or Ctrl-C; what is left ends with "
        "an error, and so does everything at a second signal",
    )
    add(
        "--hang-timeout-s",
        type=seconds,
        default=10.0,
        help="seconds without an answer to health checks after which a service is killed and "
        "restarted; up to six times as long where answers come late",
    )


def seconds(text: str) -> float:
    """A duration. Raises ValueError unless it is finite and not negative."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(f"{text} is not a duration in seconds")
    return value


def words(text: str) -> tuple[str, ...]:
    """The options of a service. Raises ValueError for an unclosed quotation."""
    return tuple(shlex.split(text))


def passed_words(options: argparse.Namespace, service: str) -> tuple[str, ...]:
    """The words for a service: those of its options that were given, then its --...-options."""
    found: list[str] = []
    for option in (*PASSED, *TO_ALL):
        value = getattr(options, option.name.replace("-", "_"))
        if option.service not in (service, "all") or value in (None, False):
            continue
        if isinstance(value, Path):
            value = value.absolute()  # the services run in another folder
        if value is True:
            found.append(f"--{option.name}")
        for each in value if isinstance(value, list) else [value] * (value is not True):
            found += [f"--{option.name}", str(each)]
    return (*found, *getattr(options, f"{service}_options"))


def explain_unknown(rest: Sequence[str]) -> str:
    """The words to write instead of those that `up` does not know."""
    unknown = [word for word in rest if word.startswith("--")]
    if not unknown:
        return f"unrecognized arguments: {' '.join(rest)}"
    return "; ".join(_explain(word.partition("=")[0].removeprefix("--")) for word in unknown)


def _explain(name: str) -> str:
    if name in other_engines.OPTIONS:
        return f"--{name}: {other_engines.OPTIONS[name].answer}"
    owners = [service for service in SERVICES if name in OPTIONS[service]]
    if owners:
        ways = " or ".join(f"--{owner}-options='--{name} ...'" for owner in owners)
        return f"--{name} is an option of the {' and the '.join(owners)}: write {ways}"
    known = dict.fromkeys(option for service in ("up", *SERVICES) for option in OPTIONS[service])
    near = get_close_matches(name, known, n=2)
    if not near:
        return f"--{name} is no option of `pagewire up` or of a service"
    own = [f"--{option}" for option in near if option in OPTIONS["up"]]
    others = [_explain(option) for option in near if option not in OPTIONS["up"]]
    hint = [f"did you mean {' or '.join(own)}?"] * bool(own) + others
    return f"--{name} is no option of `pagewire up`; {'; '.join(hint)}"
