"""The start of speculation: the drafts' source, and a worker that can take part."""

from pathlib import Path
from typing import Protocol

from pagewire.gguf.files import model_name
from pagewire.hub import names
from pagewire.v1 import worker_pb2
from scheduler_svc.core import Drafts, Scheduler
from scheduler_svc.speculation.answered_step import AnsweredStep
from scheduler_svc.speculation.drafter import Drafter
from scheduler_svc.speculation.model_drafter import ModelDrafter
from scheduler_svc.speculation.options import Method, SpeculationOptions


class Drafting(Protocol):
    """The drafts of one core; belongs to the event loop's thread."""

    def stepped(self, done: AnsweredStep) -> None:
        """Takes note of a step that was answered, and of what it took."""

    def propose(self) -> Drafts | None:
        """Drafts by slot, for the rows whose drafts pay; none for all others.

        None if no step is to be planned now: those in flight must be answered first.
        """


def make_drafter(options: SpeculationOptions, core: Scheduler) -> Drafting:
    """The source of drafts that these options name."""
    if options.method is Method.DRAFT_MODEL:
        return ModelDrafter(options, core)
    return Drafter(options, core)


def problem_with_worker(
    options: SpeculationOptions | None, worker: worker_pb2.WorkerDescription
) -> str:
    """Why these options do not fit a worker, or empty; None: nothing is drafted."""
    if options is not None and not worker.verifies_drafts:
        return "it verifies no drafts, which --speculative-config needs"
    wants_one = options is not None and options.method is Method.DRAFT_MODEL
    has_one, name = worker.HasField("draft_model"), worker.draft_model.model
    if wants_one and not has_one:
        return "it has no draft model (--draft-model), which --speculative-config needs"
    if has_one and not wants_one:
        return f"it has the draft model {name}, and --speculative-config does not say draft_model"
    if options is not None and options.model and name not in _names_of(options.model):
        return f"its draft model is {name}, --speculative-config says {options.model}"
    return ""


def _names_of(model: str) -> set[str]:
    """The names that a worker may give the model that its --draft-model spells so."""
    named = names.parse(model)
    repository = set() if named is None else {named.repository}
    return {model, model_name(Path(model)), *repository}
