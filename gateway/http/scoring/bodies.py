"""Bodies of the routes that score: Cohere's and Jina's rerank, vLLM's score."""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from gateway.errors import limits
from gateway.errors.request_errors import invalid
from gateway.http import fields
from gateway.http.messages import Strict
from gateway.http.schema import Body, Texts
from gateway.http.scoring.relevance import Pair


class Document(Strict):
    """A document as an object."""

    where: ClassVar[str | None] = "documents[]."

    text: str


def _as_documents(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    limits.check_count("documents", len(value), limits.MAX_SCORED_DOCUMENTS)
    if not value:
        raise invalid("documents", "is empty")
    return [{"text": entry} if isinstance(entry, str) else entry for entry in value]


Documents = Annotated[
    list[Document],
    BeforeValidator(_as_documents, json_schema_input_type=list[str | Document]),
]


class ScoringBody(Body):
    """Fields that both bodies have."""

    model: str | None = None
    instruction: str | None = None
    priority: int | None = None
    user: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None


class RerankBody(ScoringBody):
    """POST /v1/rerank."""

    neutral: ClassVar[fields.Neutral] = fields.RERANK

    query: str
    documents: Documents
    top_n: int | None = None
    return_documents: bool | None = None

    def to_pairs(self) -> list[Pair]:
        """The query with each of the documents. Raises RequestError."""
        if self.top_n is not None and self.top_n < 1:
            raise invalid("top_n", f"{self.top_n} is not positive")
        texts = [document.text for document in self.documents]
        return [Pair(self.query, text, f"documents[{i}]") for i, text in enumerate(texts)]


class ScoreBody(ScoringBody):
    """POST /v1/score; the texts stand under vLLM's older or newer names."""

    neutral: ClassVar[fields.Neutral] = fields.SCORE

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None

    def to_pairs(self) -> list[Pair]:
        """One text with each of the others, or as many with as many. Raises RequestError."""
        firsts = _either("queries", self.queries, "text_1", self.text_1)
        name = "text_2" if self.documents is None else "documents"
        seconds = _either("documents", self.documents, "text_2", self.text_2)
        limits.check_count(name, len(seconds), limits.MAX_SCORED_DOCUMENTS)
        if len(firsts) not in (1, len(seconds)):
            problem = f"{len(seconds)} texts for {len(firsts)}: send one, or as many of both"
            raise invalid(name, problem)
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        pairs = zip(firsts, seconds, strict=True)
        return [Pair(one, other, f"{name}[{i}]") for i, (one, other) in enumerate(pairs)]


def _either(
    name: str, texts: list[str] | None, older: str, older_texts: list[str] | None
) -> list[str]:
    """The texts under one of two names. Raises RequestError for both, for none or for no text."""
    if texts is not None and older_texts is not None:
        raise invalid(older, f"is another name of {name}; send one of them")
    if texts is None and older_texts is None:
        raise invalid(older, "is missing")
    found = older_texts if texts is None else texts
    if not found:
        raise invalid(older if texts is None else name, "is empty")
    return found
