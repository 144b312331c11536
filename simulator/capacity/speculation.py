"""Drafts of a virtual server: found in recorded tokens, or right with a given probability."""

import argparse
from dataclasses import dataclass

from scheduler_svc.core import Scheduler, Sequence
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.core.request.request import TokenIds
from scheduler_svc.speculation.drafter import Drafter
from scheduler_svc.speculation.options import Method, SpeculationOptions
from scheduler_svc.speculation.start import Drafting, make_drafter
from simulator.capacity.outputs import Outputs
from simulator.capacity.step_times import parse_step_time


@dataclass(frozen=True, slots=True)
class VirtualSpeculation:
    """The drafts of a simulation, and which come true. Raises ValueError, naming the option."""

    options: SpeculationOptions
    acceptance: float | None = None  # of each draft; None: the workload's own tokens decide
    draft_step_time: StepTime | None = None  # of the draft model
    seed: int = 0  # of what is accepted

    def __post_init__(self) -> None:
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise ValueError(f"--acceptance is {self.acceptance}, must be from 0 to 1")
        has_model = self.options.method is Method.DRAFT_MODEL
        if has_model and self.acceptance is None:
            raise ValueError(
                "--speculative-config with method draft_model needs --acceptance, the probability "
                "that a token of the draft model comes true: no model runs here"
            )
        if has_model and self.draft_step_time is None:
            raise ValueError(
                "--speculative-config with method draft_model needs --draft-step-time, the time of "
                "a step of the draft model"
            )
        if not has_model and self.draft_step_time is not None:
            raise ValueError(
                "--draft-step-time is the draft model's, and --speculative-config does not say "
                "draft_model"
            )

    def outputs(self, vocab_size: int) -> Outputs:
        """The outputs of a workload's requests, and what is foreseen of them."""
        return Outputs(vocab_size, self.acceptance or 0.0, self.seed)

    def drafter(self, core: Scheduler, outputs: Outputs) -> Drafting:
        """The production code that drafts; with an acceptance it looks nothing up."""
        if self.acceptance is None or self.options.method is Method.DRAFT_MODEL:
            return make_drafter(self.options, core)
        most = self.options.num_speculative_tokens

        def predict(sequence: Sequence, num_known: int) -> TokenIds:
            begin = num_known - sequence.num_prompt
            return outputs.foresee(sequence.request.handle, begin, most)

        return Drafter(self.options, core, predict)


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    """Adds what a simulation of --speculative-config may need in addition."""
    add = parser.add_argument_group("drafts, with --speculative-config").add_argument
    add(
        "--acceptance",
        type=float,
        metavar="P",
        help="probability that a drafted token comes true (default: the tokens of --recording)",
    )
    add(
        "--draft-step-time",
        metavar="B,T,C|FILE",
        help="as --step-time, of the draft model (method draft_model)",
    )


def take_draft_options(
    options: argparse.Namespace, drafting: SpeculationOptions | None, has_text: bool | None
) -> VirtualSpeculation | None:
    """The options of drafts; None: no drafts. `has_text`: of the recording; None: there is none.

    Raises ValueError, naming the option.
    """
    acceptance, draft_step_time = options.acceptance, options.draft_step_time
    if drafting is None:
        for name in ("acceptance", "draft_step_time"):
            if getattr(options, name) is not None:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} has no effect without --speculative-config")
        return None
    step_time = None if draft_step_time is None else parse_step_time(draft_step_time)
    speculation = VirtualSpeculation(drafting, acceptance, step_time, options.seed or 0)
    if acceptance is None and not has_text:
        why = "random" if has_text is None else "replaced, so that nothing in them repeats"
        raise ValueError(
            f"--speculative-config with method {drafting.method.value} drafts from tokens, and "
            f"those of this workload are {why}: give --acceptance, or a --recording that was made "
            "with --record-prompts keep"
        )
    return speculation
