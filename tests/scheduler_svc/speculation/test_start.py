"""A worker that the options do not fit is refused by the name of what is missing."""

import pytest

from pagewire.v1 import types_pb2, worker_pb2
from scheduler_svc.speculation.options import Method, SpeculationOptions
from scheduler_svc.speculation.start import problem_with_worker

NGRAM = SpeculationOptions(Method.NGRAM)
ANY = SpeculationOptions(Method.DRAFT_MODEL)


def named(model: str) -> SpeculationOptions:
    return SpeculationOptions(Method.DRAFT_MODEL, model=model)


def worker(draft_model: str = "", verifies: bool = True) -> worker_pb2.WorkerDescription:
    model = types_pb2.ModelInfo(model=draft_model) if draft_model else None
    return worker_pb2.WorkerDescription(verifies_drafts=verifies, draft_model=model)


@pytest.mark.parametrize(
    ("options", "it"),
    [
        (None, worker()),
        (None, worker(verifies=False)),
        (NGRAM, worker()),
        (ANY, worker("small")),
        (named("small"), worker("small")),
        (named("models/small"), worker("small")),
        (named("models/small-Q8_0.gguf"), worker("small")),
        (named("org/small"), worker("org/small")),
        (named("org/small@main"), worker("org/small")),
    ],
)
def test_a_worker_that_fits_is_taken(
    options: SpeculationOptions | None, it: worker_pb2.WorkerDescription
) -> None:
    assert problem_with_worker(options, it) == ""


@pytest.mark.parametrize(
    ("options", "it", "why"),
    [
        (NGRAM, worker(verifies=False), "verifies no drafts"),
        (ANY, worker(), "has no draft model (--draft-model), which --speculative-config needs"),
        (None, worker("small"), "has the draft model small, and --speculative-config does not"),
        (NGRAM, worker("small"), "has the draft model small, and --speculative-config does not"),
        (
            named("other"),
            worker("small"),
            "its draft model is small, --speculative-config says other",
        ),
    ],
)
def test_a_worker_that_does_not_fit_is_refused(
    options: SpeculationOptions | None, it: worker_pb2.WorkerDescription, why: str
) -> None:
    assert why in problem_with_worker(options, it)
