"""Times structured output: reading a vocabulary, building a matcher, filling masks.

Needs a folder with a tokenizer.json, no model. The comparison with another library, of
docs/decisions/0010, was made at commit 637a3548, which has it.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from bench.harness.records import new_parser
from bench.harness.services import commit, hardware
from gateway.structure.structure import JsonSchema
from wire.grammar import Vocabulary, new_matcher, read_vocabulary

ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string"},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
    "required": ["street", "zip"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        "address": ADDRESS,
    },
    "required": ["name", "age", "address"],
    "additionalProperties": False,
}
ADA = {
    "name": "Ada Lovelace",
    "age": 36,
    "email": "ada@example.com",
    "tags": ["a", "b"],
    "address": {"street": "12 St James's Square, London", "zip": "12345"},
}
MANY = {f"field_{i}": {"type": "string", "maxLength": 50} for i in range(300)}
CASES: dict[str, tuple[Any, Any]] = {
    "any object": ({"type": "object"}, ADA),
    "a person": (PERSON, ADA),
    "300 properties": ({"type": "object", "properties": MANY}, dict.fromkeys(MANY, "x")),
    "5000 names": ({"enum": [f"value-{i}" for i in range(5000)]}, "value-4711"),
}


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """(result of work, milliseconds)."""
    begin = time.perf_counter()
    result = work()
    return result, (time.perf_counter() - begin) * 1e3


def rss_mib() -> float:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def row(vocabulary: Vocabulary, schema: Any, token_ids: list[int], repeats: int) -> str:
    """Milliseconds until the first mask, and microseconds per further mask."""
    starts, masks = [], []
    for _ in range(repeats):
        # As gateway and worker build it.
        place, start_ms = timed(
            lambda: new_matcher(vocabulary, JsonSchema("", schema).to_grammar())
        )
        starts.append(start_ms)
        for token_id in token_ids:
            assert place.consume_token(token_id)
            masks.append(timed(place.compute_bitmask)[1] * 1e3)
    masks.sort()
    worst = masks[int(len(masks) * 0.99)]
    middle, mean = statistics.median(masks), statistics.fmean(masks)
    return f"{statistics.median(starts):12.1f}{middle:12.0f}{mean:12.0f}{worst:12.0f}"


def main() -> None:
    parser = new_parser("bench.grammars", __doc__)
    parser.add_argument("folder", type=Path, help="folder with tokenizer.json")
    parser.add_argument("--vocab-size", type=int, help="default: the tokenizer's own")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    definition = (args.folder / "tokenizer.json").read_text("utf-8")
    tokenizer = tokenizers.Tokenizer.from_str(definition)
    vocab_size = args.vocab_size or tokenizer.get_vocab_size()
    print(f"{hardware()}, commit {commit()}, {vocab_size} ids, one thread")
    before = rss_mib()
    vocabulary, read_ms = timed(lambda: read_vocabulary(definition, vocab_size, [0]))
    print(f"vocabulary read in {read_ms:.0f} ms, {rss_mib() - before:.0f} MiB")
    print(f"{'':20}{'start, ms':>12}{'mask, us':>12}{'mean':>12}{'p99':>12}")
    for name, (schema, example) in CASES.items():
        token_ids = tokenizer.encode(json.dumps(example), add_special_tokens=False).ids
        print(f"{name:20}" + row(vocabulary, schema, token_ids, args.repeats), flush=True)


if __name__ == "__main__":
    main()
