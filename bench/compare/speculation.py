"""Tokens per second with drafts, and without, on the same product.

    python -m bench.compare.speculation [--model FILE] [--method ngram suffix] [--streams 1 8]
    python -m bench.compare.speculation --method draft_model [--draft-model FILE] [--deepened 4]

Prompts whose answers repeat them (edit this code, summarize this text, fill this JSON) are answered
greedily, and prompts of random tokens at temperature 1, `--streams` at a time. Several streams have
several prompts each (`--waves`): of a single wave the slowest answer alone would be timed in the
end. Off and on run in turn, so that both see the same machine; outputs must be equal, token for
token, or the run fails, which in bfloat16 it may.
Without --draft-model the model drafts for itself: every draft comes true, and none can pay. With
--deepened the model served has so many times its layers, of which the new ones add nothing: every
draft comes true, and costs so much less than a token of the model served.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pagewire
from bench.harness.checkpoints import deepened
from bench.harness.records import Results, new_parser
from bench.harness.repeating import REPEATING, random_prompts
from bench.harness.services import ProductFailed, free_ports, settings
from bench.harness.stack import started
from default_model.folder import ensure, ensure_file
from pagewire.cli.launcher import services
from pagewire.cli.launcher.options.draft_model import words_for_worker

MAX_MODEL_LEN = 2048  # of a deepened model, whose blocks are large
CACHE = {"cpu": ("--kv-cache-gib", "1"), "cuda": ("--num-kv-blocks", "4096")}  # one of several
RANDOM_LENGTH, RANDOM_VOCABULARY = 200, 10_000
REPEATED, RANDOM = "repeating", "random"


@dataclass(frozen=True, slots=True)
class Answered:
    """One round of prompts."""

    tokens_per_s: float
    outputs: list[list[int]]


def main(arguments: Sequence[str]) -> int:
    """Measures each method against none; 1 if an output differs."""
    options = _parse(arguments)
    results = Results(options.json, ["python", "-m", "bench.compare.speculation", *arguments])
    configs: dict[str, dict[str, object] | None] = {"off": None}
    for method in options.method:
        config = {"method": method, "num_speculative_tokens": options.tokens}
        configs[method] = config
        if method == "draft_model":
            draft = options.draft_model or options.model
            draft = draft or (ensure() if options.deepened else ensure_file())
            config["model"] = str(draft.absolute())
    is_equal = True
    with ExitStack() as stack:
        if options.deepened:
            deep = Path(stack.enter_context(TemporaryDirectory())) / "deep"
            plain = options.model or ensure()
            options.model = deepened(plain, deep, options.deepened, MAX_MODEL_LEN)
        clients = {
            name: stack.enter_context(served(options, config, device=options.device))
            for name, config in configs.items()
        }
        for workload in (REPEATED, RANDOM):
            for num_streams in options.streams:
                is_equal &= _compare(options, results, clients, workload, num_streams)
    return 0 if is_equal else 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("bench.compare.speculation", __doc__)
    add = parser.add_argument
    add("--model", type=Path, help="folder or GGUF file (default: the default model)")
    add("--method", nargs="+", default=["ngram"], choices=["ngram", "suffix", "draft_model"])
    add("--draft-model", type=Path, help="folder or GGUF file (default: the model itself)")
    add("--deepened", type=int, metavar="TIMES", help="serve the folder's model with more layers")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--tokens", type=int, default=4, help="num_speculative_tokens")
    add("--streams", type=int, nargs="+", default=[1], help="requests at a time")
    add("--waves", type=int, default=4, help="prompts of each stream, if there are several streams")
    add("--max-tokens", type=int, default=160, help="of each answer")
    add("--rounds", type=int, default=3, help="of which the median counts")
    add("--dtype", default="float32")
    add("--json", default="-", help="file of the results")
    return parser.parse_args(arguments)


@contextmanager
def served(
    options: argparse.Namespace,
    config: dict[str, object] | None,
    *scheduler: str,
    device: str = "cpu",
) -> Iterator[pagewire.Client]:
    """The product with these drafts and more options of the scheduler, while it is entered."""
    ports = free_ports()
    text = None if config is None else json.dumps(config)
    scheduler += () if text is None else ("--speculative-config", text)
    given = ("--device", device, "--dtype", options.dtype)
    worker = (*given, *CACHE[device], *words_for_worker(text))
    specs = services.plan(settings(ports, worker, scheduler), options.model or ensure_file())
    with (
        started(specs, ports),
        pagewire.Client(f"127.0.0.1:{ports.gateway_grpc}", timeout_s=600) as client,
    ):
        yield client


def _compare(
    options: argparse.Namespace,
    results: Results,
    clients: dict[str, pagewire.Client],
    workload: str,
    num_streams: int,
) -> bool:
    """One workload on all products, in turn; False if an output differs."""
    found: dict[str, list[Answered]] = {name: [] for name in clients}
    for number in range(options.rounds + 1):
        for name, client in clients.items():
            waves = options.waves if num_streams > 1 else 1
            measured = answered(client, workload, num_streams, options.max_tokens, waves)
            if number:  # the first round warms up
                found[name].append(measured)
    is_equal = True
    plain = found.pop("off")
    plain_per_s = statistics.median(m.tokens_per_s for m in plain)
    for name, rounds in found.items():
        per_s = statistics.median(m.tokens_per_s for m in rounds)
        is_same = all(m.outputs == plain[0].outputs for m in (*plain, *rounds))
        is_equal &= is_same
        results.add(
            "speculation",
            {
                "workload": workload,
                "streams": num_streams,
                "waves": options.waves if num_streams > 1 else 1,
                "method": name,
                "off_tokens_per_s": round(plain_per_s, 1),
                "tokens_per_s": round(per_s, 1),
                "ratio": round(per_s / plain_per_s, 3),
                "same_outputs": is_same,
            },
        )
    return is_equal


def answered(
    client: pagewire.Client, workload: str, num_streams: int, max_tokens: int, waves: int = 1
) -> Answered:
    """Answers all prompts of a workload, or as many as so many waves need, so many at a time."""
    is_random = workload == RANDOM
    prompts: list[str | list[int]] = [*REPEATING.values()]
    if is_random:
        prompts = [*random_prompts(0, len(REPEATING), RANDOM_LENGTH, RANDOM_VOCABULARY)]
    num_prompts = max(waves * num_streams, len(prompts))
    prompts = (prompts * num_prompts)[:num_prompts]

    def answer(number: int) -> list[int]:
        params = pagewire.SamplingParams(
            temperature=1.0 if is_random else 0.0,
            seed=number,
            max_tokens=max_tokens,
            ignore_eos=is_random,
        )
        prompt = prompts[number]
        if is_random:
            return list(client.generate(prompt, params).token_ids)
        messages = [{"role": "user", "content": prompt}]
        return list(client.chat(messages, params).token_ids)

    began_s = time.monotonic()
    with ThreadPoolExecutor(num_streams) as pool:
        outputs = list(pool.map(answer, range(len(prompts))))
    took_s = time.monotonic() - began_s
    if not all(outputs):
        raise ProductFailed("an answer is empty")
    return Answered(sum(map(len, outputs)) / took_s, outputs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
