"""The prompt tokens that a step of decoding rows gets, by what such steps took."""

from collections.abc import Callable

import pytest

from scheduler_svc.worker.prompt_pace import LEAST_PROMPT_TOKENS, PromptPace

DECODE_S = 0.002


def settle(pace: PromptPace, step_s: Callable[[int], float], steps: int = 40) -> int:
    """The limit after steps that each use it up."""
    for _ in range(steps):
        limit = pace.most_prompt_tokens
        assert limit is not None
        pace.observe(limit, step_s(limit), DECODE_S)
    assert pace.most_prompt_tokens is not None
    return pace.most_prompt_tokens


def test_without_a_target_there_is_no_limit() -> None:
    pace = PromptPace(None)
    pace.observe(512, 1.0, DECODE_S)
    assert pace.most_prompt_tokens is None


@pytest.mark.parametrize("per_token_s", [1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("launch_s", [0.0, 0.001])
def test_steps_come_to_take_what_they_may(per_token_s: float, launch_s: float) -> None:
    pace = PromptPace(0.020)
    limit = settle(pace, lambda n: DECODE_S + launch_s + per_token_s * n)
    step_s = DECODE_S + launch_s + per_token_s * limit
    assert 0.018 <= step_s <= 0.0205


def test_a_step_that_was_too_long_is_followed_by_a_smaller_one() -> None:
    pace = PromptPace(0.020)
    before = settle(pace, lambda n: DECODE_S + 1e-5 * n)
    pace.observe(before, 0.060, DECODE_S)  # the context has grown, or the machine is slower
    assert pace.most_prompt_tokens is not None
    assert pace.most_prompt_tokens <= before / 3


def test_a_target_that_decoding_alone_misses_lets_prompts_go_on() -> None:
    pace = PromptPace(0.001)
    assert settle(pace, lambda n: DECODE_S + 1e-5 * n) == LEAST_PROMPT_TOKENS


def test_another_worker_begins_low() -> None:
    pace = PromptPace(0.020)
    settle(pace, lambda n: DECODE_S + 1e-6 * n)
    pace.new_worker()
    assert (pace.most_prompt_tokens or 0) <= 64
