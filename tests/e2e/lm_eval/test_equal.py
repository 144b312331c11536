"""The comparison of two runs of the harness: differences are named."""

import copy
import json
from typing import Any

import pytest

from tests.e2e.lm_eval.equal import FOLDER, TASKS, compare


def results() -> dict[str, Any]:
    """Two tasks as the harness reports them, one with greedy flags and one without."""
    return {
        "results": {
            TASKS[0]: {"alias": TASKS[0], "acc,none": 0.5},
            TASKS[1]: {"alias": TASKS[1], "bits_per_byte,none": 1.25},
        },
        "samples": {
            TASKS[0]: [
                {"doc_id": 0, "filtered_resps": [(-1.0, True), (-2.0, False)]},
                {"doc_id": 1, "filtered_resps": [(-3.0, False), (-0.5, True)]},
            ],
            TASKS[1]: [{"doc_id": 0, "filtered_resps": [-100.0]}],
        },
    }


def test_equal_runs_are_equal_in_whatever_order_their_samples_come() -> None:
    other = results()
    other["samples"][TASKS[0]].reverse()
    found = list(compare(results(), other))
    assert [one.problem for one in found] == [None, None]
    assert [one.num_items for one in found] == [4, 1]


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (("results", TASKS[0], "acc,none"), 0.525, "acc,none is 0.5 through the gateway, 0.525"),
        (("samples", TASKS[0], 1, "filtered_resps", 0), (-3.01, False), "differs by 1.00e-02"),
        (("samples", TASKS[0], 1, "filtered_resps", 0), (-3.0, True), "are greedy"),
        (("samples", TASKS[1], 0, "filtered_resps", 0), float("nan"), "differs by nan"),
    ],
)
def test_what_differs_is_named(place: tuple[Any, ...], value: Any, problem: str) -> None:
    other = copy.deepcopy(results())
    inner: Any = other
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    problems = [one.problem for one in compare(results(), other) if one.problem]
    assert len(problems) == 1 and problem in problems[0]


def test_every_question_has_its_answer_among_its_choices() -> None:
    for line in (FOLDER / "sums.jsonl").read_text().splitlines():
        question = json.loads(line)
        total = question["left"] + question["right"]
        assert question["choices"][question["answer"]] == str(total)
        assert len(set(question["choices"])) == 4
