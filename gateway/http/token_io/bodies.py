"""Bodies of the three steps render, generate and derender, and their conversion to requests."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from gateway.errors import limits
from gateway.errors.request_errors import invalid, unsupported
from gateway.http import fields
from gateway.http.messages import Strict
from gateway.http.schema import (
    Body,
    ChatCompletionBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
    to_limit,
)
from gateway.request.generation import GenerationRequest

TOKENS, TEXT = "tokens", "text"
PLACE = "sampling_params"

# Fields of a generation that stand outside of its sampling parameters, or make no sense for ids.
_ELSEWHERE = (
    *("model", "stream", "stream_options", "request_id", "priority", "cache_salt", "user"),
    *("echo", "return_token_ids", "return_tokens_as_token_ids", "add_special_tokens"),
    *("best_of", "use_beam_search", "length_penalty", "early_stopping"),
)
_SAMPLING: dict[str, tuple[Any, ...]] = {
    "output_kind": (0, 1, 2),  # whether one answer is cumulative: `stream` decides it
    "flat_logprobs": (False,),
    "extra_args": ({},),
    "repetition_detection": (),
    "logits_processors": ([],),
    "thinking_token_budget": (-1,),
    "truncation_side": (),
}
_GENERATE: dict[str, tuple[Any, ...]] = {
    "features": ({},),  # of pictures
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "routed_experts_prompt_start": (0,),
}


class SamplingBody(GenerationBody):
    """The fields of vLLM's SamplingParams."""

    where: ClassVar[str | None] = f"{PLACE}."
    neutral: ClassVar[fields.Neutral] = _SAMPLING
    # They choose between ways to compute or to show the same tokens.
    harmless: ClassVar[Collection[str]] = frozenset(
        {"skip_clone", "output_text_buffer_length", "detokenize", "spaces_between_special_tokens"}
    )

    logprobs: int | None = None  # 0: the sampled token only
    bad_words_token_ids: list[list[int]] | None = None
    skip_reading_prefix_cache: bool | None = None

    @model_validator(mode="after")
    def _refuse_others(self) -> "SamplingBody":
        for name in _ELSEWHERE:
            if name in self.model_fields_set:
                raise unsupported(f"{PLACE}.{name}", "is not a sampling parameter of this route")
        return self


class GenerateTokensBody(Body):
    """POST /inference/v1/generate."""

    neutral: ClassVar[fields.Neutral] = _GENERATE

    token_ids: list[int]
    sampling_params: SamplingBody = SamplingBody()
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None

    @property
    def num_choices(self) -> int:
        """The number of outputs of the prompt."""
        return self.sampling_params.num_choices

    def to_requests(self, request_id: str) -> list[GenerationRequest]:
        """One request for each output. Raises RequestError."""
        sampling = self.sampling_params
        skips_cache = sampling.skip_prefix_cache or sampling.skip_reading_prefix_cache
        outer = {"model": self.model, "cache_salt": self.cache_salt, "stream": self.stream}
        whole = sampling.model_copy(update=outer | {"skip_prefix_cache": skips_cache})
        whole.check_outputs(1)
        limit = to_limit(sampling.max_tokens)
        words = tuple(tuple(word) for word in sampling.bad_words_token_ids or ())
        return [
            replace(one, sampling=replace(one.sampling, bad_words_token_ids=words))
            for one in whole.to_choices(request_id, tuple(self.token_ids), limit, sampling.logprobs)
        ]


class TokensChoice(Strict):
    """An output of the generate step, as it is given to the derender step."""

    harmless: ClassVar[Collection[str]] = frozenset({"routed_experts", "text", "stop_reason"})

    index: int = 0
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class TokensAnswer(Strict):
    """An answer of the generate step."""

    neutral: ClassVar[fields.Neutral] = {"kv_transfer_params": ({},)}
    harmless: ClassVar[Collection[str]] = frozenset(
        {"prompt_logprobs", "usage", "model", "output_mode", "created", "object"}
    )

    request_id: str
    choices: list[TokensChoice]

    def check(self, place: str) -> None:
        """Raises RequestError where there is nothing to turn into text."""
        if not self.choices:
            raise invalid(f"{place}.choices", "is empty")
        limits.check_count(f"{place}.choices", len(self.choices), limits.MAX_OUTPUTS)
        for index, choice in enumerate(self.choices):
            if not choice.token_ids:
                raise invalid(f"{place}.choices[{index}].token_ids", "is empty")


class DerenderChatBody(Body):
    """POST /v1/chat/completions/derender."""

    neutral: ClassVar[fields.Neutral] = {"stream": (False,), "stream_state": ()}

    model: str | None = None
    generate_response: TokensAnswer
    prompt_tokens: int | None = None
    prompt_token_ids: list[int] | None = None
    chat_request: ChatCompletionBody | None = None


class DerenderCompletionBody(Body):
    """POST /v1/completions/derender."""

    neutral: ClassVar[fields.Neutral] = {"stream": (False,), "stream_state": ()}

    model: str | None = None
    generate_responses: list[TokensAnswer]
    prompt_tokens: list[int] | None = None
    completion_request: CompletionBody | None = None
