"""Core, drafter and runner together: outputs with drafts are those without, token for token."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.core import FinishReason, Preemption
from scheduler_svc.speculation.options import Method, SpeculationOptions
from tests.e2e.speculation.cases import FEW, REPEATING, add_all, check
from tests.e2e.speculation.joined import Joined, Told

NGRAM = SpeculationOptions(Method.NGRAM, 4, prompt_lookup_min=1)
SUFFIX = SpeculationOptions(Method.SUFFIX, 6)


@pytest.mark.parametrize("options", [NGRAM, SUFFIX])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_drafts_change_no_output(
    folder: Path, told_without: dict[int, Told], options: SpeculationOptions, lookahead: int
) -> None:
    joined = Joined(folder, options, lookahead=lookahead)
    add_all(joined)
    check(joined.run(), told_without)
    counters = joined.core.counters
    assert 0 < counters.num_accepted_tokens < counters.num_drafted_tokens
    assert joined.core.view.num_free_blocks == joined.core.view.num_blocks


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE])
def test_drafts_change_no_output_where_blocks_are_short(
    folder: Path, told_without: dict[int, Told], preemption: Preemption
) -> None:
    joined = Joined(folder, NGRAM, num_blocks=14, preemption=preemption)
    add_all(joined)
    check(joined.run(), told_without)
    assert joined.core.view.num_preemptions and joined.core.counters.num_accepted_tokens


def test_drafts_change_no_output_when_workers_die(
    folder: Path, told_without: dict[int, Told]
) -> None:
    joined = Joined(folder, SUFFIX)
    add_all(joined)
    for num_steps in (5, 9, 17):
        joined.run(num_steps)
        joined.kill_worker()
    check(joined.run(), told_without)
    assert joined.core.counters.num_accepted_tokens


def test_what_repeats_takes_fewer_steps(folder: Path) -> None:
    def run(options: SpeculationOptions | None) -> Joined:
        joined = Joined(folder, options)
        joined.add(REPEATING, temperature=0.0, allowed_token_ids=FEW[:2], ignore_eos=True)
        assert joined.run()[0].reason is FinishReason.LENGTH
        return joined

    assert run(NGRAM).num_steps < run(None).num_steps


def test_a_request_is_drafted_for_from_others_of_its_tenant_alone(folder: Path) -> None:
    options = replace(SUFFIX, suffix_decoding_max_cached_requests=4)
    joined, counts = Joined(folder, options), []
    same = {"temperature": 1.0, "seed": 8, "ignore_eos": True, "max_tokens": 30}
    for tenant in ("a", "b", "a"):
        joined.add(list(range(40, 60)), tenant=tenant, **same)
        told = joined.run()
        counts.append(joined.core.counters.num_accepted_tokens)
    assert told[0].token_ids == told[1].token_ids == told[2].token_ids
    assert counts[0] == counts[1] < counts[2] - 15


@pytest.mark.parametrize("method", list(Method))
def test_nothing_is_drafted_for_a_request_that_opts_out(folder: Path, method: Method) -> None:
    draft_folder = folder if method is Method.DRAFT_MODEL else None
    joined = Joined(folder, SpeculationOptions(method), draft_folder=draft_folder)
    few = {"temperature": 0.0, "allowed_token_ids": FEW[:1], "ignore_eos": True, "max_tokens": 12}
    for skips in (True, False):
        joined.add(REPEATING, skip_speculation=skips, **few)
        told = joined.run()
        assert bool(joined.core.counters.num_drafts) is not skips
    assert told[0].token_ids == told[1].token_ids


def test_nothing_is_drafted_under_a_grammar(folder: Path) -> None:
    joined = Joined(folder, NGRAM)
    joined.add(REPEATING, temperature=0.0, grammar="start: /a*/")
    assert joined.run()[0].reason is FinishReason.DEAD_END  # the folder has no tokenizer
    assert not joined.core.counters.num_drafts


def test_the_law_of_two_tokens_is_the_same(folder: Path) -> None:
    """Chi-squared over pairs of sampled tokens of many seeds, with drafts against without."""
    num_seeds, few = 300, FEW[:3]

    def pairs(options: SpeculationOptions | None, first_seed: int) -> np.ndarray:
        joined = Joined(folder, options)
        for seed in range(first_seed, first_seed + num_seeds):
            sampled = {"temperature": 1.0, "seed": seed, "allowed_token_ids": few}
            joined.add([*REPEATING[:8], *few, *few], max_tokens=3, **sampled)
        counts = np.zeros((3, 3))
        for told in joined.run(20000).values():
            first, second = told.token_ids[1:3]
            counts[few.index(first), few.index(second)] += 1
        assert options is None or joined.core.counters.num_drafts
        return counts.reshape(-1)

    without, with_drafts = pairs(None, 0), pairs(NGRAM, num_seeds)
    both = without + with_drafts
    counted = both > 0
    chi_squared = ((without - with_drafts)[counted] ** 2 / both[counted]).sum()
    assert chi_squared < 20.09  # 8 degrees of freedom, p = 0.01
