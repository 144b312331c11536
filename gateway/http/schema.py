"""Request bodies of the HTTP API, and their conversion to requests."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, PlainValidator, model_validator
from pydantic import WithJsonSchema as JsonSchema

from gateway import limits
from gateway.chat.conversation import Conversation, Rendering, ToolChoice, ToolMode
from gateway.choices import expand
from gateway.errors import invalid
from gateway.generation import (
    MAX_LOGPROBS,
    GenerationRequest,
    PrefixReuse,
    Prompt,
    SamplingParams,
    check_range,
)
from gateway.http import fields
from gateway.http.messages import Choice, Messages, Strict, Tools
from gateway.http.structured import (
    Forms,
    ResponseFormat,
    StructuredOutputs,
    the_one_of,
    with_whitespace,
)
from gateway.structure.structure import Structure
from wire.numbers import UINT32_MAX

FIELDS_OF_CONVERSATIONS = (
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default, for completions only

Neutral = Mapping[str, tuple[Any, ...]]


class Body(Strict):
    """A request body, without the fields that mean "off"."""

    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _strip(cls, body: Any) -> Any:
        return fields.strip(body, cls.neutral, known=cls.model_fields)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopStrings = Annotated[
    list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])
]


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
    """Contents of a stream in addition to text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationBody(Body):
    """Fields that chats and completions share: OpenAI's, and vLLM's extra ones."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: StopStrings | None = None
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
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    n: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    skip_prefix_cache: bool | None = None
    user: str | None = None
    request_id: str | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        if self.stream_options is None:
            return False
        if not self.stream:
            raise invalid("stream_options", "is only allowed with stream: true")
        return bool(self.stream_options.include_usage)

    def to_choices(
        self,
        request_id: str,
        prompt: Prompt,
        max_tokens: int | None,
        num_top_logprobs: int | None,
        echo: bool = False,
    ) -> list[GenerationRequest]:
        """The n requests of this body for one prompt."""
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "is only allowed without stream: true")
        sampling = SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
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
            num_prompt_logprobs=self.prompt_logprobs,
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
            reuse=self._reuse(),
            structure=self._structure(),
            echo=echo,
        )
        return expand(request, self.n)

    def _structure(self) -> Structure | None:
        """The required structure of the output. Raises RequestError for contradicting fields."""
        guided = Forms(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        structures = guided.to_structures("guided_")
        for name in ("response_format", "structured_outputs"):
            field = getattr(self, name)
            if field is not None and (structure := field.to_structure()) is not None:
                structures[name] = structure
        name = "guided_whitespace_pattern"
        return with_whitespace(the_one_of(structures), name, self.guided_whitespace_pattern)

    def _reuse(self) -> PrefixReuse:
        if self.cache_salt == "":
            raise invalid("cache_salt", "is empty; leave it out or send a text of its own")
        return PrefixReuse(self.cache_salt or "", bool(self.skip_prefix_cache))


class ChatCompletionBody(GenerationBody):
    """POST /v1/chat/completions."""

    neutral: ClassVar[Neutral] = fields.CHAT

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
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

    def to_requests(self, request_id: str) -> list[GenerationRequest]:
        """The requests of this body."""
        limit, old_limit = self.max_completion_tokens, self.max_tokens
        if limit is not None and old_limit is not None and limit != old_limit:
            problem = f"{limit} contradicts max_tokens {old_limit}; send one of them"
            raise invalid("max_completion_tokens", problem)
        max_tokens = old_limit if limit is None else limit
        fewest = 1 if self.prompt_logprobs is None else 0
        check_range("max_completion_tokens", limit, fewest, UINT32_MAX)
        conversation = self._conversation()
        return self.to_choices(request_id, conversation, max_tokens, self.num_top_logprobs)

    def _conversation(self) -> Conversation:
        choice = self.tool_choice or ToolChoice()
        if not self.tools and choice.mode is not ToolMode.NONE and self.tool_choice is not None:
            raise invalid("tool_choice", "is only allowed with tools")
        return Conversation(
            messages=tuple(message.to_message() for message in self.messages),
            tools=tuple(tool.to_tool() for tool in self.tools or ()),
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            include_reasoning=self.include_reasoning is not False,
            rendering=replace(
                _rendering(self),
                documents=tuple(self.documents or ()),
                reasoning_effort=self.reasoning_effort,
            ),
        )


def _rendering(body: "ChatCompletionBody | TokenizeBody") -> Rendering:
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
    if value and all(type(item) is int for item in value):
        return [tuple(value)]
    limits.check_count(name, len(value), most)
    if not value:
        raise invalid(name, "is empty")
    return [_parse_prompt(f"{name}[{index}]", item) for index, item in enumerate(value)]


def _parse_prompt(name: str, item: Any) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and all(type(token_id) is int for token_id in item):
        return tuple(item)
    raise invalid(name, "must be text or a list of token ids")


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


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    neutral: ClassVar[Neutral] = fields.COMPLETION

    prompt: Prompts
    logprobs: int | None = None  # 0: the sampled token only
    echo: bool | None = None

    def to_requests(self, request_id: str) -> list[GenerationRequest]:
        """n requests per prompt, in the order of the prompts."""
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        ids = [f"{request_id}-{index}" for index in range(len(self.prompt))]
        if len(self.prompt) == 1:
            ids = [request_id]
        return [
            choice
            for one_id, prompt in zip(ids, self.prompt, strict=True)
            for choice in self.to_choices(one_id, prompt, limit, self.logprobs, bool(self.echo))
        ]


class TokenizeBody(Body):
    """POST /tokenize: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None

    def to_conversation(self) -> Conversation | None:
        """The conversation to tokenize; None for a prompt."""
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "send either prompt or messages")
        if self.messages is None:
            for name in FIELDS_OF_CONVERSATIONS:
                if getattr(self, name) is not None:
                    raise invalid(name, "is only allowed with messages")
            return None
        return Conversation(
            messages=tuple(message.to_message() for message in self.messages),
            tools=tuple(tool.to_tool() for tool in self.tools or ()),
            rendering=_rendering(self),
        )


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None
