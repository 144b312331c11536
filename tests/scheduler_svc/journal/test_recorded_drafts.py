"""Would drafts have helped? A recording's own tokens answer, and can be counted by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewire.v1 import worker_pb2
from scheduler_svc.core import Request, SchedulerConfig, StepResult
from scheduler_svc.journal.options import RecordOptions
from scheduler_svc.journal.start import make_core
from scheduler_svc.sampling import Sampling
from simulator import simulate
from simulator.capacity.recorded import read_recorded

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
#       step 1  2  with the drafts 3 4 5 6   8 1 (2 3)   -  -   3 4 5 6
ANSWER = [1, 2, *(3, 4, 5, 6, 7), *(8, 1, 99), 1, 2, *(3, 4, 5, 6, 7)]


Turn = tuple[list[int], list[int]]  # prompt and output


def record(folder: Path, *turns: Turn, keeps_prompts: bool = True, **fields: object) -> Path:
    """Requests one after the other, as a scheduler records them."""
    config = SchedulerConfig(
        num_blocks=100,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
        vocab_size=200,
    )
    worker, options = worker_pb2.WorkerDescription(), RecordOptions(folder, 8, keeps_prompts)
    made = make_core(config, worker, "here", options)
    core = made.core
    for number, (prompt, output) in enumerate(turns):
        given: Any = {"tenant": "ab"[number % 2], "arrival_s": 10.0 * number, **fields}
        token_ids, sampling = np.array(prompt, dtype=np.int32), Sampling(0.0, 1.0, 0, 0.0, 0)
        most = len(output)
        core.add(Request(str(number), token_ids, max_tokens=most, sampling=sampling, **given))
        for token_id in output:
            plan = core.schedule()
            assert plan is not None
            core.now_s += 0.01
            core.update(StepResult(plan.step_id, np.array([token_id], dtype=np.int32)))
    assert made.recorder is not None
    made.recorder.close()
    return folder


def simulated(
    capsys: pytest.CaptureFixture[str], folder: Path, config: dict[str, object], *options: str
) -> Any:
    """The summary, with steps in which a draft costs a hundredth of a token."""
    plain = ["--recording", str(folder), "--step-time", "0.01,1e-4,0", "--lookahead", "0"]
    drafts = ["--speculative-config", json.dumps(config)] if config else []
    assert simulate.main([*plain, *drafts, *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["summary"]


NGRAM: dict[str, object] = {"method": "ngram", "num_speculative_tokens": 4}


def test_a_recording_holds_the_tokens_that_were_answered(tmp_path: Path) -> None:
    (arrival,) = read_recorded(record(tmp_path / "a", (PROMPT, ANSWER))).arrivals
    assert arrival.recorded is not None
    assert arrival.recorded.prompt.tolist() == PROMPT
    assert arrival.recorded.output.tolist() == ANSWER


def test_drafts_come_true_as_counted_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first two steps have nothing to compare with: no token is known twice, no step timed.

    Then three verifications with four drafts each, of which 4, 2 and 4 are right; after the token
    that nothing foresees, two steps pass until two tokens are known again.
    """
    folder = record(tmp_path / "a", (PROMPT, ANSWER))
    off, on = (simulated(capsys, folder, config) for config in ({}, NGRAM))
    assert (off["num_steps"], off["drafts"]) == (len(ANSWER), None)
    assert on["num_steps"] == 7
    assert on["drafts"] == {
        "num_verifications": 3,
        "num_drafted_tokens": 12,
        "num_accepted_tokens": 10,
        "acceptance_rate": 10 / 12,
        "tokens_per_verification": 1 + 10 / 3,
    }
    assert on["e2e"]["p50_s"] < off["e2e"]["p50_s"] / 2


def test_a_request_that_took_no_drafts_takes_none_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record(tmp_path / "a", (PROMPT, ANSWER), skip_speculation=True)
    assert simulated(capsys, folder, NGRAM)["drafts"]["num_verifications"] == 0


def test_suffix_drafts_from_other_requests_of_the_tenant_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    novel = list(range(100, 130))
    shared = {"method": "suffix", "suffix_decoding_max_cached_requests": 10}

    def accepted(config: dict[str, object], **fields: object) -> int:
        name = str(len(list(tmp_path.iterdir())))
        folder = record(tmp_path / name, (PROMPT, novel), (PROMPT, novel), **fields)
        count = simulated(capsys, folder, config)["drafts"]["num_accepted_tokens"]
        assert isinstance(count, int)
        return count

    assert accepted(shared, tenant="a") > 15
    assert accepted({"method": "suffix"}, tenant="a") == 0
    assert accepted(shared) == 0, "of two tenants"
    assert accepted(shared, tenant="a", skip_prefix_cache=True) == 0


def test_replaced_tokens_answer_nothing_and_a_probability_may(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record(tmp_path / "a", (PROMPT, ANSWER), keeps_prompts=False)
    with pytest.raises(SystemExit):
        simulated(capsys, folder, NGRAM)
    assert "replaced, so that nothing in them repeats" in capsys.readouterr().err
    drafts = simulated(capsys, folder, NGRAM, "--acceptance", "1", "--seed", "3")["drafts"]
    assert drafts["acceptance_rate"] == 1.0 and drafts["tokens_per_verification"] > 4


@pytest.mark.parametrize("config", [{}, NGRAM])
def test_a_later_turn_finds_the_answer_before_it_in_the_prefix_cache(
    config: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = [*PROMPT, *ANSWER, 50, 51, 52]
    folder = record(tmp_path / "a", (PROMPT, ANSWER), (later, [53]))
    # Of 25 tokens the last is not computed; blocks have four.
    share = 24 / (len(PROMPT) + len(later))
    assert simulated(capsys, folder, config)["cached_share"] == pytest.approx(share)
