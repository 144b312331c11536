"""The relevance of a document to a query, by the served model's own judgement.

The model is asked in a chat whether the document meets the query. The score is the probability of
`yes` among `yes` and `no` as the first token of its answer: p(yes) / (p(yes) + p(no)), at
temperature 1 and unfiltered. The words of the question are those that Qwen3-Reranker was trained
with.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.chat.conversation import Conversation, Message, Rendering
from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.request.generation import (
    GenerationRequest,
    PrefixReuse,
    SamplingParams,
    Standing,
    WholeOutput,
)

YES, NO = "yes", "no"
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_LARGEST_EXPONENT = 700.0  # of a float


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """The tokens that answers may begin with, and the variables that keep a model from thinking."""

    yes_id: int
    no_id: int
    rendering: Rendering


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts to compare, and the name of the document in errors."""

    query: str
    document: str
    name: str


@dataclass(frozen=True, slots=True)
class Relevance:
    """The score of a pair, 0 to 1, and the tokens of its prompt."""

    score: float
    num_prompt_tokens: int


def conversation_of(pair: Pair, instruction: str, rendering: Rendering) -> Conversation:
    """The question for the model."""
    text = f"<Instruct>: {instruction}\n<Query>: {pair.query}\n<Document>: {pair.document}"
    turns = Message("system", SYSTEM), Message("user", text)
    return Conversation(turns, rendering=rendering)


def requests_of(
    request_id: str, pair: Pair, instruction: str, verdict: AnswerTokens, standing: Standing
) -> tuple[GenerationRequest, GenerationRequest]:
    """Two outputs of one token each, of which the prompt is computed once: `yes`, then `no`.

    Each may be its own token alone, so its log probability is reported, however unlikely it is.
    """
    request = GenerationRequest(
        request_id,
        conversation_of(pair, instruction, verdict.rendering),
        standing=standing,
        reuse=PrefixReuse(fork_group=request_id),
    )

    def forced(suffix: str, token_id: int) -> GenerationRequest:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=(token_id,), num_top_logprobs=0
        )
        return replace(request, request_id=f"{request_id}-{suffix}", sampling=sampling)

    return forced("0", verdict.yes_id), forced("1", verdict.no_id)


def relevance_of(outputs: Sequence[WholeOutput]) -> Relevance:
    """The relevance from the two outputs of a pair. Raises RequestError when one was aborted."""
    if not all(output.logprobs for output in outputs):
        raise RequestError(ErrorKind.CANCELLED, "the request was aborted")
    yes, no = (output.logprobs[0].sampled.logprob for output in outputs)
    # Not by exp(yes): both may be too unlikely for a float.
    score = 1 / (1 + math.exp(min(no - yes, _LARGEST_EXPONENT)))
    return Relevance(score, outputs[0].finish.usage.num_prompt_tokens)
