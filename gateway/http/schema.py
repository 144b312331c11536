"""Request bodies of the HTTP API, and their conversion to requests."""

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BeforeValidator, PlainValidator, model_validator
from pydantic import WithJsonSchema as JsonSchema

from gateway.chat.conversation import Conversation, Rendering, ToolChoice, ToolMode
from gateway.errors import limits
from gateway.errors.request_errors import invalid
from gateway.http import fields
from gateway.http.attribution import unattributed
from gateway.http.candidates.body import CandidateFields
from gateway.http.events import Extras
from gateway.http.messages import Choice, Messages, Strict, Tools, to_tools
from gateway.http.structured import (
    Forms,
    ResponseFormat,
    StructuredOutputs,
    the_one_of,
    with_whitespace,
)
from gateway.request.generation import (
    MAX_LOGPROBS,
    GenerationRequest,
    PrefixReuse,
    Prompt,
    SamplingParams,
    Truncation,
    check_range,
)
from gateway.structure.tags import Asked
from wire.requests.numbers import UINT32_MAX

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default, for completions only
NO_LIMIT = -1  # of max_tokens
RANDOM_SEED = -1


class Body(Strict):
    """A request body."""

    where: ClassVar[str | None] = ""
    harmless: ClassVar[Collection[str]] = fields.HARMLESS


def _as_texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(_as_texts, json_schema_input_type=str | list[str])]


def _parse_biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Parses an object of token ids (strings in JSON) and biases. Raises RequestError."""
    if not isinstance(value, dict):
        raise invalid("logit_bias", "must be an object of token ids and biases")
    limits.check_count("logit_bias", len(value), limits.MAX_LOGIT_BIASES)
    for token_id, bias in value.items():
        if not _TOKEN_ID.fullmatch(token_id):
            raise invalid("logit_bias", "has a key that is no token id")
        if type(bias) not in (int, float):
            raise invalid("logit_bias", f"has a bias for {token_id} that is no number")
    return tuple((int(token_id), bias) for token_id, bias in value.items())


_TOKEN_ID = re.compile("[0-9]{1,10}")
_BIASES_SCHEMA = {"type": "object", "additionalProperties": {"type": "number"}}
Biases = Annotated[
    tuple[tuple[int, float], ...], PlainValidator(_parse_biases), JsonSchema(_BIASES_SCHEMA)
]


class StreamOptions(Strict):
    """Contents of a stream in addition to text; without effect where nothing is streamed."""

    where: ClassVar[str | None] = "stream_options."

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(CandidateFields, Body):
    """Fields that chats and completions share: OpenAI's, and vLLM's extra ones."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Texts | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    skip_prefix_cache: bool | None = None
    skip_speculation: bool | None = None
    user: str | None = None
    request_id: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def extras(self) -> Extras:
        """Parts of the answer in addition to its text."""
        options = self.stream_options or StreamOptions()
        return Extras(
            has_usage=bool(options.include_usage),
            counts_usage=bool(options.include_usage and options.continuous_usage_stats),
            is_obfuscated=bool(options.include_obfuscation),
            has_token_ids=bool(self.return_token_ids),
            spells_ids=bool(self.return_tokens_as_token_ids),
            echo=self._echoed,
        )

    @property
    def _echoed(self) -> str:
        """The text of a chat that precedes the answer's content."""
        return ""

    def to_choices(
        self,
        request_id: str,
        prompt: Prompt,
        max_tokens: int | None,
        num_top_logprobs: int | None,
        echo: bool = False,
    ) -> list[GenerationRequest]:
        """The requests of this body for one prompt. Raises RequestError."""
        if self.logprob_token_ids and num_top_logprobs is None:  # best_of asks for some by itself
            raise invalid("logprob_token_ids", "is only allowed with logprobs")
        sampling = SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=None if self.seed == RANDOM_SEED else self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or (),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            num_top_logprobs=num_top_logprobs,
            logprob_token_ids=tuple(self.logprob_token_ids or ()),
            num_prompt_logprobs=self.prompt_logprobs,
            skip_speculation=self.skip_speculation,
        )
        request = GenerationRequest(
            request_id=request_id,
            prompt=prompt,
            sampling=sampling,
            stop=tuple(self.stop or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            model=self.model,
            add_special_tokens=self.add_special_tokens,
            bad_words=tuple(self.bad_words or ()),
            reuse=to_reuse(self.cache_salt, self.skip_prefix_cache),
            structure=self._structure(),
            echo=echo,
            truncation=to_truncation(self.truncate_prompt_tokens, self.truncation_side),
            returns_prompt_ids=self.extras.has_token_ids or (echo and self.extras.spells_ids),
            counts_usage=bool(self.stream) and self.extras.counts_usage,
        )
        return self.candidates(request)

    def _structure(self) -> Asked | None:
        """The required structure of the output. Raises RequestError for contradicting fields."""
        guided = Forms(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        structures = guided.to_structures("guided_")
        for name in ("response_format", "structured_outputs"):
            field = getattr(self, name)
            if field is not None and (structure := field.to_structure()) is not None:
                structures[name] = structure
        name = "guided_whitespace_pattern"
        return with_whitespace(the_one_of(structures), name, self.guided_whitespace_pattern)


def to_reuse(cache_salt: str | None, skips: bool | None = None) -> PrefixReuse:
    """The prompt's share in the prefix cache. Raises RequestError."""
    if cache_salt == "":
        raise invalid("cache_salt", "is empty; leave it out or send a text of its own")
    return PrefixReuse(cache_salt or "", bool(skips))


def to_truncation(num_tokens: int | None, side: str | None = None) -> Truncation | None:
    """The way to shorten a prompt; by default its end is kept. Raises RequestError."""
    if num_tokens is None:
        return None
    check_range("truncate_prompt_tokens", num_tokens, -1, UINT32_MAX)
    if num_tokens == 0:
        raise invalid("truncate_prompt_tokens", "0 tokens are no prompt")
    return Truncation(None if num_tokens == NO_LIMIT else num_tokens, side == "right")


def to_limit(max_tokens: int | None) -> int | None:
    """The number of tokens; -1 is as many as the model's limit leaves room for."""
    return UINT32_MAX if max_tokens == NO_LIMIT else max_tokens


class ChatCompletionBody(GenerationBody):
    """POST /v1/chat/completions."""

    neutral: ClassVar[fields.Neutral] = fields.CHAT
    harmless: ClassVar[Collection[str]] = fields.CHAT_HARMLESS

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        """top_logprobs, if logprobs is true; else None. Raises RequestError."""
        num_top = self.top_logprobs or 0
        if not 0 <= num_top <= MAX_LOGPROBS:
            raise invalid("top_logprobs", f"{num_top} is outside [0, {MAX_LOGPROBS}]")
        if num_top and not self.logprobs:
            raise invalid("top_logprobs", "is only allowed with logprobs: true")
        return num_top if self.logprobs else None

    @property
    def _echoed(self) -> str:
        """The text of a last turn that the answer goes on with."""
        if not self.echo or not self.messages or self.messages[-1].role != "assistant":
            return ""
        return self.messages[-1].to_message().content or ""

    @property
    def _max_reasoning_tokens(self) -> int | None:
        """The budget of reasoning; None: any number. Raises RequestError."""
        budget = self.thinking_token_budget
        check_range("thinking_token_budget", budget, NO_LIMIT, UINT32_MAX)
        return None if budget == NO_LIMIT else budget

    def to_requests(self, request_id: str) -> list[GenerationRequest]:
        """The requests of this body."""
        limit = to_limit(self.max_completion_tokens)
        max_tokens = to_limit(self.max_tokens) if limit is None else limit
        fewest = 1 if self.prompt_logprobs is None else 0
        check_range("max_completion_tokens", limit, fewest, UINT32_MAX)
        conversation = self._conversation()
        return self.to_choices(request_id, conversation, max_tokens, self.num_top_logprobs)

    def _conversation(self) -> Conversation:
        choice = self.tool_choice or ToolChoice()
        if not self.tools and choice.mode is ToolMode.REQUIRED:
            raise invalid("tool_choice", "is only allowed with tools")
        return Conversation(
            messages=unattributed([message.to_message() for message in self.messages]),
            tools=to_tools(self.tools or ()),
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            include_reasoning=self.include_reasoning is not False,
            max_reasoning_tokens=self._max_reasoning_tokens,
            rendering=replace(
                rendering_of(self),
                documents=tuple(self.documents or ()),
                reasoning_effort=self.reasoning_effort,
            ),
        )


class RenderingFields(Protocol):
    """Fields of a body for the chat template."""

    chat_template_kwargs: dict[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def rendering_of(body: RenderingFields) -> Rendering:
    """The settings of the chat template in a body."""
    return Rendering(
        kwargs=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )


def parse_prompts(name: str, value: Any, most: int) -> list[str | tuple[int, ...]]:
    """Parses a prompt or a list of them, each text or token ids. Raises RequestError."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid(name, "must be text, token ids or a list of either")
    if value and _are_ids(value):
        return [tuple(value)]
    limits.check_count(name, len(value), most)
    if not value:
        raise invalid(name, "is empty")
    return [_parse_prompt(f"{name}[{index}]", item) for index, item in enumerate(value)]


def _parse_prompt(name: str, item: Any) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and _are_ids(item):
        return tuple(item)
    raise invalid(name, "must be text or a list of token ids")


def _are_ids(items: list[Any]) -> bool:
    """True if all are integers, and none a boolean; without a step of Python for each."""
    return set(map(type, items)) <= {int}


def _parse_prompts(value: Any) -> list[str | tuple[int, ...]]:
    return parse_prompts("prompt", value, limits.MAX_PROMPTS)


PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
Prompts = Annotated[
    list[str | tuple[int, ...]], PlainValidator(_parse_prompts), JsonSchema(PROMPT_SCHEMA)
]


def _parse_num_logprobs(value: Any) -> Any:
    """Chats have a flag of this name: true is the sampled token and its likeliest alternative."""
    if isinstance(value, bool):
        return 1 if value else None
    return value


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    neutral: ClassVar[fields.Neutral] = fields.COMPLETION
    harmless: ClassVar[Collection[str]] = fields.GENERATION_HARMLESS

    prompt: Prompts
    logprobs: Annotated[
        int | None, BeforeValidator(_parse_num_logprobs, json_schema_input_type=int | bool | None)
    ] = None  # 0: the sampled token only

    @model_validator(mode="before")
    @classmethod
    def _read_null(cls, body: Any) -> Any:
        """As in vLLM null is no limit, and not the default of requests that leave it out."""
        if isinstance(body, dict) and body.get("max_tokens", 0) is None:
            return body | {"max_tokens": NO_LIMIT}
        return body

    def to_requests(self, request_id: str) -> list[GenerationRequest]:
        """The requests of each prompt, in the order of the prompts."""
        self.check_outputs(len(self.prompt))
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else to_limit(self.max_tokens)
        ids = [f"{request_id}-{index}" for index in range(len(self.prompt))]
        if len(self.prompt) == 1:
            ids = [request_id]
        return [
            choice
            for one_id, prompt in zip(ids, self.prompt, strict=True)
            for choice in self.to_choices(one_id, prompt, limit, self.logprobs, bool(self.echo))
        ]
