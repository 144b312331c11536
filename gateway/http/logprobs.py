"""Log probabilities in OpenAI's two forms: lists of objects for chats, columns for completions."""

from collections.abc import Sequence
from typing import Any

from gateway.text.logprobs import Candidate, OutputTokenLogprobs
from gateway.text.prompt_outputs import PromptScores

# JSON has no infinity; tokens this unlikely are not sampled.
LEAST_LOGPROB = -9999.0


def chat_logprobs(tokens: Sequence[OutputTokenLogprobs]) -> dict[str, Any]:
    """One object per token, with its likeliest alternatives."""
    content = [
        {**_chat_token(token.sampled), "top_logprobs": [_chat_token(top) for top in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[OutputTokenLogprobs]) -> dict[str, Any]:
    """Columns; the sampled token is always among its alternatives."""
    return {
        "tokens": [_text(token.sampled) for token in tokens],
        "token_logprobs": [_logprob(token.sampled) for token in tokens],
        "top_logprobs": [
            {_text(candidate): _logprob(candidate) for candidate in (token.sampled, *token.top)}
            for token in tokens
        ],
        "text_offset": [token.text_offset for token in tokens],
    }


def echo_logprobs(scores: PromptScores, tokens: Sequence[OutputTokenLogprobs]) -> dict[str, Any]:
    """Columns of a prompt and its output; the very first token has no values."""
    columns = completion_logprobs((*scores.others, *tokens))
    first = {"tokens": _spelled(scores.first_spelling), "text_offset": 0}
    return {name: [first.get(name), *column] for name, column in columns.items()}


def prompt_logprobs(scores: PromptScores) -> list[dict[str, Any] | None]:
    """vLLM's form: a map by id per token, the prompt's own token first; None for the first."""
    return [None, *map(_by_token_id, scores.others)]


def _by_token_id(token: OutputTokenLogprobs) -> dict[str, Any]:
    return {
        str(candidate.token_id): {
            "logprob": _logprob(candidate),
            "rank": candidate.rank,
            "decoded_token": _text(candidate),
        }
        for candidate in (token.sampled, *token.top)
    }


def _chat_token(candidate: Candidate) -> dict[str, Any]:
    return {
        "token": _text(candidate),
        "logprob": _logprob(candidate),
        "bytes": list(candidate.spelling),
    }


def _text(candidate: Candidate) -> str:
    return _spelled(candidate.spelling)


def _spelled(spelling: bytes) -> str:
    """A token's text, or its bytes as OpenAI writes them if it has incomplete characters."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def _logprob(candidate: Candidate) -> float:
    return max(candidate.logprob, LEAST_LOGPROB)
