"""POST …/derender: token ids of finished outputs as the answer of a chat or a completion."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from gateway.chat.parts import reply_of
from gateway.errors import limits
from gateway.errors.request_errors import invalid
from gateway.http.events import CHAT, COMPLETION, message_body, usage_body
from gateway.http.logprobs import as_text
from gateway.http.token_io.bodies import (
    DerenderChatBody,
    DerenderCompletionBody,
    TokensAnswer,
    TokensChoice,
)
from gateway.pipeline.output_reader import OutputReader
from gateway.pipeline.pipeline import INLINE_VALUES, Pipeline
from gateway.request.generation import (
    Finish,
    FinishReason,
    GenerationRequest,
    ServedModel,
    Usage,
    WholeOutput,
    check_range,
    check_token_ids,
    completion_of,
    parts_of,
)
from gateway.scheduler.live_request import TokenArrival
from gateway.text.logprobs import Candidate
from gateway.tokens.tokenizer import Tokenizer
from wire.requests.numbers import UINT32_MAX

SPELLED_ID = re.compile(r"token_id:([0-9]{1,10})")
TOOL_CALLS = "tool_calls"


class Derenderer:
    """Turns token ids into text with the served model's tokenizer and parsers."""

    def __init__(self, pipeline: Pipeline, tokenizer: Tokenizer) -> None:
        self._pipeline = pipeline
        self._tokenizer = tokenizer

    async def chat(self, body: DerenderChatBody) -> dict[str, Any]:
        """The answer of a chat. Raises RequestError."""
        model = self._pipeline.resolve_model(body.model)
        answered, place = body.generate_response, "generate_response"
        answered.check(place)
        wanted = None
        if body.chat_request is not None:
            wanted, *_ = body.chat_request.to_requests(answered.request_id)
        num_prompt_tokens = _num_prompt_tokens(body)
        new_reader = await self._new_reader(wanted)
        choices, outputs = [], []
        for index, choice in enumerate(answered.choices):
            output = await self._read(choice, new_reader(), model, f"{place}.choices[{index}]")
            outputs.append(output)
            choices.append(self._chat_choice(choice, output))
        return _answer(answered, CHAT.whole_object, model, choices) | {
            "usage": _usage(outputs, num_prompt_tokens)
        }

    async def completion(self, body: DerenderCompletionBody) -> dict[str, Any]:
        """The answer of a completion with one or more prompts. Raises RequestError."""
        model = self._pipeline.resolve_model(body.model)
        responses, name = body.generate_responses, "generate_responses"
        if not responses:
            raise invalid(name, "is empty")
        limits.check_count(name, len(responses), limits.MAX_PROMPTS)
        counts = body.prompt_tokens or [0] * len(responses)
        if len(counts) != len(responses):
            raise invalid("prompt_tokens", f"{len(counts)} entries, {len(responses)} are needed")
        wanted = None
        if body.completion_request is not None:
            wanted, *_ = body.completion_request.to_requests(responses[0].request_id)
        new_reader = await self._new_reader(wanted)
        choices: list[dict[str, Any]] = []
        outputs: list[WholeOutput] = []
        for position, answered in enumerate(responses):
            answered.check(f"{name}[{position}]")
            for index, choice in enumerate(answered.choices):
                place = f"{name}[{position}].choices[{index}]"
                output = await self._read(choice, new_reader(), model, place)
                outputs.append(output)
                choices.append(self._completion_choice(len(choices), choice, output))
        return _answer(responses[0], COMPLETION.whole_object, model, choices) | {
            "usage": _usage(outputs, sum(counts))
        }

    async def _read(
        self, choice: TokensChoice, reader: OutputReader, model: ServedModel, place: str
    ) -> WholeOutput:
        """The output of some ids; many are read off the event loop. Raises RequestError."""
        read = partial(_read, choice, reader, model, place)
        is_short = len(choice.token_ids or ()) <= INLINE_VALUES
        return read() if is_short else await self._pipeline.run_aside(read)

    async def _new_reader(self, wanted: GenerationRequest | None) -> Callable[[], OutputReader]:
        """The maker of readers for outputs of the request; without one all text is content."""
        if wanted is None:
            wanted = GenerationRequest("", (0,))
        # What was asked about log probabilities and the prompt came from the generate step.
        sampling = replace(wanted.sampling, num_top_logprobs=None, num_prompt_logprobs=None)
        sampling = replace(sampling, logprob_token_ids=())
        plain = replace(wanted, sampling=sampling, echo=False, returns_prompt_ids=False)
        _, new_reader = await self._pipeline.prepare(replace(plain, beams=None))
        return new_reader

    def _chat_choice(self, choice: TokensChoice, output: WholeOutput) -> dict[str, Any]:
        reply = reply_of(parts_of(output))
        reason = choice.finish_reason
        if reply.tool_calls and reason == FinishReason.STOP.value:
            reason = TOOL_CALLS
        return {
            "index": choice.index,
            "message": message_body(reply),
            "logprobs": self._spelled(choice.logprobs),
            "finish_reason": reason,
            "stop_reason": output.finish.stop_string,
        }

    def _completion_choice(
        self, index: int, choice: TokensChoice, output: WholeOutput
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": output.text,
            "logprobs": _columns(self._spelled(choice.logprobs)),
            "finish_reason": choice.finish_reason,
            "stop_reason": output.finish.stop_string,
        }

    def _spelled(self, logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
        """Log probabilities with the text and bytes of their tokens in place of ids."""
        if logprobs is None:
            return None
        content = logprobs.get("content")
        if not isinstance(content, list):
            raise invalid("logprobs.content", "must be a list of tokens")
        return {"content": [self._spelled_token(token) for token in content], "refusal": None}

    def _spelled_token(self, token: Any) -> dict[str, Any]:
        if not isinstance(token, dict) or not isinstance(token.get("token"), str):
            raise invalid("logprobs.content", "holds an entry without a token")
        shown = dict(token)
        if named := SPELLED_ID.fullmatch(token["token"]):
            token_id = int(named[1])
            check_token_ids("logprobs.content", (token_id,), self._tokenizer.vocab_size)
            spelling = self._tokenizer.spell(token_id)
            shown["token"] = as_text(Candidate(token_id, 0.0, 0, spelling))
            shown["bytes"] = list(spelling)
        if isinstance(top := token.get("top_logprobs"), list):
            shown["top_logprobs"] = [self._spelled_token(one) for one in top]
        return shown


def _read(
    choice: TokensChoice, reader: OutputReader, model: ServedModel, place: str
) -> WholeOutput:
    """An output from its ids. Raises RequestError for one outside the vocabulary."""
    token_ids = list(choice.token_ids or ())
    check_token_ids(f"{place}.token_ids", tuple(token_ids), model.vocab_size)
    reason = FinishReason.LENGTH if choice.finish_reason == "length" else FinishReason.STOP
    end = Finish(reason, Usage(0, len(token_ids)))
    return completion_of([reader.read(TokenArrival(token_ids, (), end), 0)])


def _answer(
    answered: TokensAnswer, kind: str, model: ServedModel, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "id": answered.request_id,
        "object": kind,
        "created": int(time.time()),
        "model": model.name,
        "choices": choices,
    }


def _num_prompt_tokens(body: DerenderChatBody) -> int:
    """The length of the prompt, as the caller knows it. Raises RequestError."""
    check_range("prompt_tokens", body.prompt_tokens, 0, UINT32_MAX)
    if body.prompt_token_ids is None:
        return body.prompt_tokens or 0
    num_tokens = len(body.prompt_token_ids)
    if body.prompt_tokens not in (None, num_tokens):
        raise invalid("prompt_tokens", f"is {body.prompt_tokens}, and there are {num_tokens} ids")
    return num_tokens


def _usage(outputs: list[WholeOutput], num_prompt_tokens: int) -> dict[str, Any]:
    usages = [output.finish.usage for output in outputs]
    num_tokens = sum(usage.num_completion_tokens for usage in usages)
    num_reasoning = sum(usage.num_reasoning_tokens for usage in usages)
    return usage_body(Usage(num_prompt_tokens, num_tokens, 0, num_reasoning))


def _columns(logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
    """The log probabilities of a chat in the columns of a completion."""
    if logprobs is None:
        return None
    tokens = logprobs["content"]
    offsets, total = [], 0
    for token in tokens:
        offsets.append(total)
        total += len(token["token"])
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token.get("logprob") for token in tokens],
        "top_logprobs": [
            {one["token"]: one.get("logprob") for one in token.get("top_logprobs") or (token,)}
            for token in tokens
        ],
        "text_offset": offsets,
    }
