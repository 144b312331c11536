"""Log probabilities in OpenAI's two forms: lists of objects for chats, columns for completions."""

from collections.abc import Callable, Sequence
from typing import Any

from gateway.text.logprobs import Candidate, OutputTokenLogprobs
from gateway.text.prompt_outputs import PromptScores

# JSON has no infinity; tokens this unlikely are not sampled.
LEAST_LOGPROB = -9999.0


Namer = Callable[[Candidate], str]


def as_text(candidate: Candidate) -> str:
    """A token's text, or its bytes as OpenAI writes them if it has incomplete characters."""
    try:
        return candidate.spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in candidate.spelling)


def as_id(candidate: Candidate) -> str:
    """A token's id, as vLLM writes it."""
    return f"token_id:{candidate.token_id}"


def chat_logprobs(tokens: Sequence[OutputTokenLogprobs], name: Namer) -> dict[str, Any]:
    """One object per token, with its likeliest alternatives."""
    content = [
        {
            **_chat_token(token.sampled, name),
            "top_logprobs": [_chat_token(top, name) for top in _shown(token)],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _shown(token: OutputTokenLogprobs) -> Sequence[Candidate]:
    """The alternatives; the token itself precedes those that a request names, as in vLLM."""
    if not token.is_named:
        return token.top
    others = [top for top in token.top if top.token_id != token.sampled.token_id]
    return [token.sampled, *others]


def completion_logprobs(tokens: Sequence[OutputTokenLogprobs], name: Namer) -> dict[str, Any]:
    """Columns; the sampled token is always among its alternatives."""
    return {
        "tokens": [name(token.sampled) for token in tokens],
        "token_logprobs": [_logprob(token.sampled) for token in tokens],
        "top_logprobs": [
            {name(candidate): _logprob(candidate) for candidate in (token.sampled, *token.top)}
            for token in tokens
        ],
        "text_offset": [token.text_offset for token in tokens],
    }


def echo_logprobs(
    scores: PromptScores, tokens: Sequence[OutputTokenLogprobs], first: str, name: Namer
) -> dict[str, Any]:
    """Columns of a prompt and its output; the `first` token has no values."""
    columns = completion_logprobs((*scores.others, *tokens), name)
    of_first = {"tokens": first, "text_offset": 0}
    return {key: [of_first.get(key), *column] for key, column in columns.items()}


def prompt_logprobs(scores: PromptScores, name: Namer) -> list[dict[str, Any] | None]:
    """vLLM's form: a map by id per token, the prompt's own token first; None for the first."""
    return [None, *(_by_token_id(token, name) for token in scores.others)]


def _by_token_id(token: OutputTokenLogprobs, name: Namer) -> dict[str, Any]:
    return {
        str(candidate.token_id): {
            "logprob": _logprob(candidate),
            "rank": candidate.rank,
            "decoded_token": name(candidate),
        }
        for candidate in (token.sampled, *token.top)
    }


def _chat_token(candidate: Candidate, name: Namer) -> dict[str, Any]:
    return {
        "token": name(candidate),
        "logprob": _logprob(candidate),
        "bytes": list(candidate.spelling),
    }


def _logprob(candidate: Candidate) -> float:
    return max(candidate.logprob, LEAST_LOGPROB)
