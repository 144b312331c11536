"""Measures how often a token that is computed another way is another one, in each type.

    python -m bench.compare.recomputed [--dtypes bfloat16 float16 float32] [--tokens 300]
    python -m bench.compare.recomputed --kv-cache-dtype fp8 --quantization int8
    python -m bench.compare.recomputed --device cuda --dtypes bfloat16 [--shape qwen3-0.6b]

Fifty prompts are answered, every second one greedily, the others by a seed at temperature 1: the
calm run, one token a step. The same outputs are then computed in other ways:

    recomputed  a quarter, half and three quarters of each output are computed with its prompt, as
                after the death of a worker, a preemption, or when a client sends them as a prompt
    drafted     drafts of the method `ngram` are verified wherever there are any
    chunked     prompts are computed in chunks of 32 tokens
    alone       each of the first eight prompts is answered alone

An output is compared up to the first token that differs, as all that follow have another past.
`per_1000` is the number of outputs that part by 1,000 tokens that were compared.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from bench.harness import checkpoints
from bench.harness.records import Results, add_json, new_parser
from bench.harness.repeating import random_prompts
from bench.harness.sequences import Prompt, RunnerSequences, Way, blocks_of
from default_model.folder import ensure
from scheduler_svc.speculation.options import Method, SpeculationOptions
from worker_svc.config import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS, WorkerConfig
from worker_svc.device.device import set_num_threads
from worker_svc.protocol.step import RowSampling
from worker_svc.startup import startup

WAYS = ("recomputed", "drafted", "chunked", "alone")
CUTS = (0.25, 0.5, 0.75)
CHUNK, NUM_ALONE, NUM_DRAFTS = 32, 8, 4
MOST_AT_ONCE = 2048
BLOCK_SIZE = 16
RANDOM_LENGTH, RANDOM_VOCABULARY = 40, 10_000
SUBJECTS = (
    "the tides", "a steam engine", "photosynthesis", "the stock market", "an earthquake",
    "a rainbow", "the human heart", "a bicycle", "the printing press", "a black hole",
    "bread baking", "the Roman republic", "a compiler", "vaccination", "a violin",
    "the water cycle", "a chess opening", "an airplane wing", "the alphabet", "a volcano",
    "the moon landing", "a battery", "the silk road", "a telescope", "honey bees",
)  # fmt: skip
FORMS = ("Explain {} to a child in a few sentences.", "Write a list of ten facts about {}.")


NGRAM = SpeculationOptions(Method.NGRAM, num_speculative_tokens=NUM_DRAFTS)


@dataclass(frozen=True, slots=True)
class Parted:
    """Counts of all outputs that were computed in one way."""

    outputs: int
    parted: int
    compared: int  # tokens

    @property
    def per_1000(self) -> float:
        """Outputs that part, by 1,000 tokens."""
        return round(1000 * self.parted / max(self.compared, 1), 3)


def compare(calm: Sequence[Sequence[int]], other: Sequence[Sequence[int]], known: int) -> Parted:
    """Compares outputs from the first token on that was not known."""
    parted = compared = 0
    for expected, found in zip(calm, other, strict=True):
        assert len(expected) == len(found)
        differs = [a != b for a, b in zip(expected[known:], found[known:], strict=True)]
        first = differs.index(True) if True in differs else None
        parted += first is not None
        compared += len(differs) if first is None else first + 1
    return Parted(len(calm), parted, compared)


def summed(found: Sequence[Parted]) -> Parted:
    """All of them as one."""
    return Parted(*(sum(getattr(one, name) for one in found) for name in Parted.__slots__))


def measure(
    stepping: RunnerSequences, prompts: Sequence[Prompt], num_tokens: int, ways: Sequence[str]
) -> Iterator[tuple[str, Parted]]:
    """Answers all prompts calmly, then in every way."""
    plain = Way(num_tokens, MOST_AT_ONCE)
    calm = stepping.outputs(prompts, plain)
    for way in ways:
        if way == "recomputed":
            cuts = [int(num_tokens * cut) for cut in CUTS]
            known = [[output[:cut] for output in calm] for cut in cuts]
            runs = [stepping.outputs(prompts, plain, given) for given in known]
            pairs = zip(runs, cuts, strict=True)
            yield way, summed([compare(calm, run, cut) for run, cut in pairs])
        elif way == "alone":
            each = [stepping.outputs([prompt], plain)[0] for prompt in prompts[:NUM_ALONE]]
            yield way, compare(calm[: len(each)], each, 0)
        elif way == "drafted":
            yield way, compare(calm, stepping.outputs(prompts, replace(plain, drafts=NGRAM)), 0)
        else:
            chunked = replace(plain, most_at_once=CHUNK)
            yield way, compare(calm, stepping.outputs(prompts, chunked), 0)


def questions(folder: Path, count: int) -> list[list[int]]:
    """Token ids of chats of one question each."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [form.format(subject) for form in FORMS for subject in SUBJECTS]
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts]
    return [tokenizer.encode(chat).ids for chat in (chats * count)[:count]]


def sampled(prompts: Sequence[Sequence[int]]) -> list[Prompt]:
    """Every second prompt greedily, the others at temperature 1 by a seed."""
    samplings = [
        RowSampling(temperature=float(number % 2), seed=1000 + number)
        for number in range(len(prompts))
    ]
    return [Prompt(tuple(ids), s) for ids, s in zip(prompts, samplings, strict=True)]


def stepping_of(
    options: argparse.Namespace, folder: Path, dtype: str, prompts: Sequence[Prompt]
) -> RunnerSequences:
    """A model in this type, with slots and blocks for all prompts and their drafts."""
    longest = max(len(prompt.token_ids) for prompt in prompts) + options.tokens
    blocks = blocks_of(longest, BLOCK_SIZE)
    config = WorkerConfig(
        device=options.device,
        dtype=dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        quantization=options.quantization,
        block_size=BLOCK_SIZE,
        max_num_seqs=len(prompts) * (1 + NUM_DRAFTS),
        max_num_batched_tokens=MOST_AT_ONCE,
        max_model_len=blocks * BLOCK_SIZE,
        num_kv_blocks=1 + blocks * len(prompts),
    )
    model = startup.load(config, folder, dtype, "")
    runner = startup.build_runner(config, model, config.num_kv_blocks)
    runner.warm_up()
    return RunnerSequences(runner, blocks)


def main(arguments: Sequence[str]) -> int:
    """Measures each type; prints a line for each way."""
    options = _parse(arguments)
    results = Results(options.json, ["python", "-m", "bench.compare.recomputed", *arguments])
    set_num_threads(options.threads, 1)
    with ExitStack() as stack:
        if options.shape:
            folder = stack.enter_context(checkpoints.temporary(options.shape))
            ids = random_prompts(0, options.prompts, RANDOM_LENGTH, RANDOM_VOCABULARY)
            prompts = sampled(list(ids))
        else:
            folder = options.model or ensure()
            prompts = sampled(questions(folder, options.prompts))
        for dtype in options.dtypes:
            stepping = stepping_of(options, folder, dtype, prompts)
            for way, found in measure(stepping, prompts, options.tokens, options.ways):
                facts = {"dtype": dtype, "way": way, **asdict(found), "per_1000": found.per_1000}
                if way == "drafted":
                    facts["drafts"] = stepping.num_drafted
                results.say(" ".join(f"{name} {value}" for name, value in facts.items()))
                given = {"kv_cache_dtype": options.kv_cache_dtype, "device": options.device}
                given |= {"quantization": options.quantization, "shape": options.shape}
                results.add("recomputed", facts | given)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("bench.compare.recomputed", __doc__)
    add = parser.add_argument
    add("--model", type=Path, help="folder with the default model's chat format (default: it)")
    add("--shape", choices=checkpoints.SHAPES, help="random weights of a shape, random prompts")
    add("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"])
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    add("--quantization", choices=QUANTIZATIONS, default="auto")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--threads", type=int, default=0, help="of the CPU (default: all)")
    add("--prompts", type=int, default=50)
    add("--tokens", type=int, default=30, help="of each output")
    add("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    add_json(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
