"""POST /tokenize and /detokenize."""

from functools import partial
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.responses import Response

from gateway.chat.conversation import Conversation
from gateway.errors import limits
from gateway.errors.request_errors import invalid
from gateway.http import fields
from gateway.http.completions import unless_disconnected
from gateway.http.large_answers import answered
from gateway.http.messages import Messages, Tools, to_tools
from gateway.http.schema import Body, rendering_of
from gateway.pipeline.pipeline import INLINE_VALUES, Pipeline
from gateway.request.generation import check_token_ids
from gateway.tokens.tokenizer import Tokenizer

# With the values that ask for nothing, which a prompt may have, too.
FIELDS_OF_CONVERSATIONS: dict[str, Any] = {
    "tools": [],
    "chat_template_kwargs": {},
    "add_generation_prompt": True,
    "continue_final_message": False,
}


class TokenizeBody(Body):
    """POST /tokenize: either a prompt or messages."""

    neutral: ClassVar[fields.Neutral] = fields.TOKENIZE

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
            for name, nothing in FIELDS_OF_CONVERSATIONS.items():
                if getattr(self, name) not in (None, nothing):
                    raise invalid(name, "is only allowed with messages")
            return None
        return Conversation(
            messages=tuple(message.to_message() for message in self.messages),
            tools=to_tools(self.tools or ()),
            rendering=rendering_of(self),
        )


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


def add_token_routes(app: FastAPI, pipeline: Pipeline, tokenizer: Tokenizer) -> None:
    """Adds both routes."""

    async def token_ids_of(body: TokenizeBody) -> list[int]:
        conversation = body.to_conversation()
        is_chat = conversation is not None
        text = body.prompt or "" if conversation is None else await tokenizer.write(conversation)
        adds = (not is_chat) if body.add_special_tokens is None else body.add_special_tokens
        field = "messages" if is_chat else "prompt"
        return await tokenizer.encode(field, text, add_special_tokens=adds)

    @app.post("/tokenize", response_model=dict[str, Any])
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        model = pipeline.resolve_model(body.model)
        token_ids = await unless_disconnected(request, token_ids_of(body))
        num_tokens = len(token_ids)
        answer = {
            "tokens": token_ids,
            "count": num_tokens,
            "max_model_len": model.max_model_len,
        }
        return await answered(pipeline, lambda: answer, num_values=num_tokens)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        model = pipeline.resolve_model(body.model)
        limits.check_count("tokens", len(body.tokens), limits.MAX_DETOKENIZE_IDS)
        decode = partial(_decoded, tokenizer, body, model.vocab_size)
        is_short = len(body.tokens) <= INLINE_VALUES
        return {"prompt": decode() if is_short else await pipeline.run_aside(decode)}


def _decoded(tokenizer: Tokenizer, body: DetokenizeBody, vocab_size: int) -> str:
    """The text of the ids. Raises RequestError for one outside the vocabulary."""
    check_token_ids("tokens", tuple(body.tokens), vocab_size)
    return tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
