"""Outputs that have ended are kept for their tenant and salt, and not without bound."""

import numpy as np
import pytest

from scheduler_svc.core import Request, Sequence
from scheduler_svc.speculation import past_outputs
from scheduler_svc.speculation.past_outputs import PastOutputs


def request(tenant: str = "a", salt: str = "", skips: bool = False) -> Request:
    prompt = np.array([1, 2, 3], dtype=np.int32)
    return Request("r", prompt, tenant=tenant, cache_salt=salt, skip_prefix_cache=skips)


def ended(output: list[int], **fields: object) -> Sequence:
    sequence = Sequence(request(**fields), 100, ())  # type: ignore[arg-type]
    sequence.token_ids = np.array([1, 2, 3, *output], dtype=np.int32)
    return sequence


def kept(past: PastOutputs, **fields: object) -> list[int]:
    return past.of(request(**fields)).tolist()  # type: ignore[arg-type]


def test_an_output_is_kept_with_the_end_of_its_prompt() -> None:
    past = PastOutputs(4, 2)
    past.add(ended([7, 8]))
    past.add(ended([]))  # it had no output
    past.add(ended([9]))
    assert kept(past) == [2, 3, 7, 8, -1, 2, 3, 9, -1]


def test_no_other_tenant_or_salt_has_it() -> None:
    past = PastOutputs(4, 0)
    past.add(ended([7]))
    past.add(ended([8], tenant="b"))
    past.add(ended([9], salt="s"))
    past.add(ended([5], skips=True))
    assert (kept(past), kept(past, tenant="b"), kept(past, salt="s")) == ([7, -1], [8, -1], [9, -1])
    assert (
        kept(past, tenant="c") == kept(past, tenant="b", salt="s") == kept(past, skips=True) == []
    )


def test_the_oldest_requests_go_first() -> None:
    past = PastOutputs(2, 0)
    for token_id, tenant in ((5, "b"), (6, "a"), (7, "a")):
        past.add(ended([token_id], tenant=tenant))
    assert (kept(past), kept(past, tenant="b")) == ([6, -1, 7, -1], [])
    past.add(ended([8], tenant="b"))
    assert (kept(past), kept(past, tenant="b")) == ([7, -1], [8, -1])


def test_nothing_is_kept_unless_asked() -> None:
    past = PastOutputs(0, 2)
    past.add(ended([7, 8]))
    assert kept(past) == []


def test_tokens_are_bounded_for_each_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_outputs, "MAX_TOKENS_OF_ONE", 6)
    monkeypatch.setattr(past_outputs, "MAX_TOKENS", 10)
    past = PastOutputs(9, 0)
    past.add(ended([5] * 4, tenant="b"))
    past.add(ended([6, 6]))
    past.add(ended([7, 7, 7]))
    assert (kept(past), kept(past, tenant="b")) == ([7, 7, 7, -1], [5, 5, 5, 5, -1])
    past.add(ended([8] * 9))  # the end of a long one is kept
    assert (kept(past), kept(past, tenant="b")) == ([8, 8, 8, 8, 8, -1], [])
    past.add(ended([9], tenant="b"))
    assert kept(past, tenant="b") == [9, -1]
