"""The progress of a live request, as the debug service describes it."""

from dataclasses import dataclass

from gateway.request.generation import GenerationRequest


@dataclass(slots=True)
class RequestProgress:
    """A live request."""

    request: GenerationRequest
    num_prompt_tokens: int
    started_s: float
    first_token_s: float | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def scoped_id(self) -> str:
        """The request's id at the scheduler."""
        return self.request.standing.scoped(self.request.request_id)
