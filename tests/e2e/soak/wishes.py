"""The requests of a soak: each has one right answer, which its twin gave on a calm server."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
}
WORDS = ("the", "a", "river", "blue", "seven", "under", "walks", "Paris", "code", "and", "7", ".")
LONG_WORDS = 1200


@dataclass(frozen=True, slots=True)
class Wish:
    """A body of POST /v1/completions, which says all about the answer."""

    kind: str
    body: dict[str, Any]

    @property
    def num_outputs(self) -> int:
        """Choices of the answer."""
        return int(self.body.get("n", 1))


def draw(num_wishes: int, seed: int) -> Sequence[Wish]:
    """Requests of every kind in turn, greedy or with seeds."""
    rng = random.Random(seed)
    return [_wish(rng, KINDS[index % len(KINDS)], index) for index in range(num_wishes)]


KINDS = ("greedy", "seeded", "penalized", "grammar", "schema", "several", "long", "stops")


def _wish(rng: random.Random, kind: str, index: int) -> Wish:
    body: dict[str, Any] = {
        "prompt": _text(rng, rng.randrange(3, 60)),
        "max_tokens": rng.choice((8, 24, 64, 128)),
        "temperature": 0,
    }
    match kind:
        case "seeded":
            body |= {"temperature": 1.0, "seed": index, "top_p": 0.9, "ignore_eos": True}
        case "penalized":
            body |= {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
        case "grammar":
            body |= {"guided_regex": "[abc]{5,30}( [0-9]{2}){1,9}", "temperature": 1, "seed": index}
        case "schema":
            body |= {"guided_json": json.dumps(SCHEMA), "temperature": 1, "seed": index}
        case "several":
            body |= {"n": 2, "temperature": 0.8, "seed": index, "top_k": 50}
        case "long":
            body |= {"prompt": _text(rng, rng.randrange(LONG_WORDS // 4, LONG_WORDS))}
        case "stops":
            body |= {"temperature": 1, "seed": index, "stop": ["e", "zq"], "max_tokens": 64}
    return Wish(kind, body)


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))
