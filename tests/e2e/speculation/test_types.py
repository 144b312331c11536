"""On CPU tokens and log probabilities are those of the calm run in every type.

The calm run decodes one token a step; the others verify drafts, are preempted, or lose their
worker. Log probabilities are compared bit for bit: a random model has few near ties, and one
difference in a last bit would change the token at the next one.
"""

from pathlib import Path

import pytest
import torch

from scheduler_svc.speculation.options import Method, SpeculationOptions
from tests.e2e.speculation.cases import CASES, FEW, REPEATING
from tests.e2e.speculation.joined import Joined, Types

DRAFTS = SpeculationOptions(Method.NGRAM, 4, prompt_lookup_min=1)
TYPES = (
    Types("float32"),
    Types("bfloat16"),
    Types("bfloat16", kv_cache="fp8_e4m3"),
    Types("bfloat16", rounding="int8"),
)


def ask(joined: Joined) -> None:
    """All kinds of requests, with prompts of several lengths, and all with log probabilities."""
    for number, fields in enumerate(CASES.values()):
        joined.add(REPEATING[number:], **{**fields, "logprobs": 2})
    for length in (9, 20, 31):  # whose outputs are foreseen
        joined.add(REPEATING[:length], temperature=0.0, allowed_token_ids=FEW[:2], logprobs=2)
    joined.add(list(range(3, 120)), temperature=0.0, logprobs=2)  # in two chunks


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_drafts_preemptions_and_dead_workers_change_no_bit(folder: Path, types: Types) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for tiny steps
    try:
        _compare(folder, types)
    finally:
        torch.set_num_threads(threads)


def _compare(folder: Path, types: Types) -> None:
    calm = Joined(folder, types=types)
    if not calm.attention_backend.startswith("c/"):
        pytest.skip("no C compiler: torch computes, whose sums depend on the number of rows")
    ask(calm)
    expected = calm.run()
    drafted = Joined(folder, DRAFTS, types=types)
    ask(drafted)
    assert drafted.run() == expected
    assert drafted.core.counters.num_accepted_tokens > 10
    crowded = Joined(folder, num_blocks=14, types=types)
    ask(crowded)
    for num_steps in (5, 9, 17):
        crowded.run(num_steps)
        crowded.kill_worker()
    assert crowded.run() == expected
    assert crowded.core.view.num_preemptions
