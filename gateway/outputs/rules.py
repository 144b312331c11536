"""Rules of a beam search: fields that cannot go with one are refused by name."""

from typing import Any

from gateway.chat.conversation import Conversation, ToolMode
from gateway.errors import limits
from gateway.errors.request_errors import unsupported
from gateway.request.beam_options import MAX_BEAMS
from gateway.request.generation import GenerationRequest
from wire.sampling import NUMBERS

MAX_CANDIDATES = 128  # likeliest tokens that the scheduler reports per token
_PROBLEM = "cannot go with a beam search"

# Field -> what changes nothing. Beams are no samples, and their scores are the model's own.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: number.off for name, number in NUMBERS.items()},
    "temperature": (0, 1),
    "min_tokens": (0,),
    "logit_bias": ((),),
    "allowed_token_ids": ((),),
    "logprob_token_ids": ((),),
    "bad_words_token_ids": ((),),
}


def check_beams(request: GenerationRequest) -> None:
    """Raises RequestError naming the first field that asks for what a beam search does not do."""
    for name, neutral in _NEUTRAL.items():
        value = getattr(request.sampling, name)
        if value is not None and value not in neutral:
            raise unsupported(name, _PROBLEM)
    refused = {
        "stop": request.stop,
        "bad_words": request.bad_words,
        "echo": request.echo,
        "prompt_logprobs": request.sampling.num_prompt_logprobs is not None,
        "resume_token_ids": request.resume_token_ids,
    }
    if request.structure is not None:
        refused[request.structure.place] = True
    if isinstance(chat := request.prompt, Conversation):
        refused["tools"] = chat.tools and chat.tool_choice.mode is not ToolMode.NONE
        refused["thinking_token_budget"] = chat.max_reasoning_tokens is not None
    for name, is_asked in refused.items():
        if is_asked:
            raise unsupported(name, _PROBLEM)
    longest_id = f"{request.standing.scoped(request.request_id)}-{MAX_BEAMS}"
    limits.check_bytes("request_id", longest_id, limits.MAX_REQUEST_ID_BYTES)


def check_candidates(num_candidates: int, vocab_size: int, name: str) -> None:
    """Raises RequestError for more beams and end tokens than can be told apart; `name` is theirs.

    With fewer tokens in the vocabulary a beam could have no continuation left.
    """
    most = min(MAX_CANDIDATES, vocab_size)
    if num_candidates > most:
        problem = f"these and the stop tokens need {num_candidates} candidates a beam"
        raise unsupported(name, f"{problem}, at most {most} are compared")
