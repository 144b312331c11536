"""The body of Cohere's `/v2/embed`."""

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from gateway.errors import limits
from gateway.errors.request_errors import invalid, unsupported
from gateway.http import fields, media
from gateway.http.messages import Strict
from gateway.http.schema import Body
from gateway.request.generation import GenerationRequest, PromptPooling, Truncation, check_range
from wire.requests.numbers import UINT32_MAX

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
MAX_TYPES = 6


class TextContent(Strict):
    """A piece of text in an input."""

    harmless: ClassVar[Collection[str]] = fields.COPIED
    where: ClassVar[str | None] = "inputs[].content[]."

    type: Literal["text"]
    text: str


def _check_content(parts: Any) -> Any:
    if not isinstance(parts, list):
        return parts
    limits.check_count("inputs[].content", len(parts), limits.MAX_CONTENT_PARTS)
    return media.readable("inputs[].content", parts, ("text",), takes_pictures=False)


class EmbedInput(Strict):
    """One input in pieces, which are joined by line breaks."""

    where: ClassVar[str | None] = "inputs[]."

    content: Annotated[list[TextContent], BeforeValidator(_check_content)]

    @property
    def text(self) -> str:
        """The whole text."""
        return "\n".join(part.text for part in self.content)


def _counted(name: str, most: int) -> BeforeValidator:
    def check(value: Any) -> Any:
        if isinstance(value, list):
            limits.check_count(name, len(value), most)
        return value

    return BeforeValidator(check)


class EmbedBody(Body):
    """POST /v2/embed."""

    neutral: ClassVar[fields.Neutral] = fields.COHERE_EMBED

    model: str | None = None
    input_type: (
        Literal["search_document", "search_query", "classification", "clustering", "image"] | None
    ) = None
    texts: Annotated[list[str] | None, _counted("texts", limits.MAX_EMBEDDING_INPUTS)] = None
    inputs: Annotated[list[EmbedInput] | None, _counted("inputs", limits.MAX_EMBEDDING_INPUTS)] = (
        None
    )
    max_tokens: int | None = None
    output_dimension: int | None = None
    embedding_types: Annotated[
        list[EmbeddingType] | None, _counted("embedding_types", MAX_TYPES)
    ] = None
    truncate: Literal["NONE", "START", "END"] = "END"
    priority: int | None = None

    @property
    def types(self) -> list[EmbeddingType]:
        """The forms in which the vectors are written, each once."""
        return list(dict.fromkeys(self.embedding_types or ["float"]))

    @property
    def all_texts(self) -> tuple[str, list[str]]:
        """The field that holds the texts, and the texts. Raises RequestError."""
        if self.input_type == "image":
            raise unsupported("input_type", media.IMAGE)
        if self.texts and self.inputs:
            raise invalid("inputs", "contradicts texts; send one of them")
        if self.texts:
            return "texts", self.texts
        if self.inputs:
            return "inputs", [one.text for one in self.inputs]
        raise invalid("texts", "is missing" if self.texts is None else "is empty")

    def to_requests(self, request_id: str) -> list[GenerationRequest]:
        """One request per text. Raises RequestError."""
        _, texts = self.all_texts
        truncation = self._truncation()
        return [
            GenerationRequest(
                request_id=request_id if len(texts) == 1 else f"{request_id}-{index}",
                prompt=text,
                model=self.model,
                pooling=PromptPooling.LAST,
                truncation=truncation,
            )
            for index, text in enumerate(texts)
        ]

    def _truncation(self) -> Truncation | None:
        check_range("max_tokens", self.max_tokens, 1, UINT32_MAX)
        if self.truncate != "NONE":
            return Truncation(self.max_tokens, keeps_start=self.truncate == "END")
        if self.max_tokens is not None:
            raise unsupported("max_tokens", 'is supported with truncate "START" or "END"')
        return None
