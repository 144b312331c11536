"""Several outputs for one prompt: requests that differ only in id and seed."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from gateway.errors.request_errors import invalid
from gateway.request.generation import GenerationRequest, Usage

MAX_CHOICES = 128


def expand(request: GenerationRequest, num_choices: int | None) -> list[GenerationRequest]:
    """The `n` requests, in the order of their choices. Raises RequestError naming n.

    A beam search is one request, whatever the number of its outputs.
    """
    if num_choices is None or num_choices == 1 or request.beams is not None:
        return [request]
    if not 1 < num_choices <= MAX_CHOICES:
        raise invalid("n", f"{num_choices} is outside [1, {MAX_CHOICES}]")
    return [_choice(request, index) for index in range(num_choices)]


def resume(
    choices: Sequence[GenerationRequest], known: Sequence[Sequence[int] | None]
) -> list[tuple[int, GenerationRequest]]:
    """The outputs left to generate of a broken stream, each with the index of its choice.

    `known` holds the tokens that the caller has of each choice; None if it has the end.
    """
    if len(known) != len(choices):
        problem = f"{len(known)} entries, one for each of {len(choices)} outputs is needed"
        raise invalid("resume_outputs", problem)
    return [
        (index, replace(choice, resume_token_ids=tuple(token_ids)))
        for index, (choice, token_ids) in enumerate(zip(choices, known, strict=True))
        if token_ids is not None
    ]


def _choice(request: GenerationRequest, index: int) -> GenerationRequest:
    sampling = request.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=choice_seed(sampling.seed, index))
    return replace(
        request,
        request_id=f"{request.request_id}-{index}",
        sampling=sampling,
        # The scheduler computes the common prompt once.
        reuse=replace(request.reuse, fork_group=request.request_id),
    )


def is_first_choice(request: GenerationRequest) -> bool:
    """True if a request is alone with its prompt, or the first of the choices that share it."""
    shared = request.reuse.fork_group
    return not shared or request.request_id == f"{shared}-0"


def choice_seed(seed: int, index: int) -> int:
    """The seed of one choice: the request's own for the first, unrelated ones for the others.

    Hashed, so that the second choice of seed 1 is not the first choice of seed 2. None without a
    seed: then the scheduler draws one per choice.
    """
    if index == 0:
        return seed
    # A seed out of range is refused elsewhere, so its upper bits do not matter here.
    bits = (seed % (1 << 64)).to_bytes(8, "little") + index.to_bytes(2, "little")
    return int.from_bytes(blake2b(bits, digest_size=8).digest(), "little")


def total_usage(usages: Sequence[Usage], num_choices: int) -> Usage:
    """Total token counts of all outputs; a prompt counts once per `num_choices` outputs."""
    firsts = usages[::num_choices]
    return Usage(
        num_prompt_tokens=sum(usage.num_prompt_tokens for usage in firsts),
        num_completion_tokens=sum(usage.num_completion_tokens for usage in usages),
        num_cached_tokens=sum(usage.num_cached_tokens for usage in firsts),
        num_reasoning_tokens=sum(usage.num_reasoning_tokens for usage in usages),
    )
