"""Checks the output so far of requests that another scheduler had begun."""

from scheduler_svc.core.request.config import SchedulerConfig
from scheduler_svc.core.request.request import Request

# As callers of the gateway and of the scheduler name it.
_OUTPUT = "resume_token_ids (prompt_token_ids after num_prompt_tokens)"


def continuation_problem(request: Request, max_len: int, config: SchedulerConfig) -> str | None:
    """Why a request cannot continue after its output so far; None when it can, or is new.

    Every output that has ended was delivered with its end, so none may be submitted to be
    continued.
    """
    output = request.output_token_ids
    if output is None or not len(output):
        return None
    if output.min() < 0 or output.max() >= config.vocab_size:
        return f"{_OUTPUT}: has an id outside 0..{config.vocab_size - 1}"
    if len(request.prompt_token_ids) + len(output) >= max_len:
        room = max_len - len(request.prompt_token_ids)
        return f"{_OUTPUT}: has {len(output)} tokens, it ended at {room}"
    eos = () if request.ignore_eos else config.eos_token_ids
    stops = {*eos, *request.stop_token_ids}
    ended = [i for i in output[max(request.min_tokens - 1, 0) :].tolist() if i in stops]
    return f"{_OUTPUT}: ended with token {ended[0]}" if ended else None
