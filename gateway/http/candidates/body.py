"""Numbers of outputs: OpenAI's n and best_of, and vLLM's beam search."""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import PlainValidator
from pydantic import WithJsonSchema as JsonSchema

from gateway.errors import limits
from gateway.errors.request_errors import invalid, unsupported
from gateway.http.messages import Strict
from gateway.outputs.best_of import BestOf
from gateway.request.beam_options import NEVER, BeamNames, BeamOptions, EarlyStopping
from gateway.request.choices import MAX_CHOICES, expand
from gateway.request.generation import GenerationRequest


def _parse_early_stopping(value: Any) -> EarlyStopping:
    if isinstance(value, bool):
        return value
    if value == NEVER:
        return NEVER
    raise invalid("early_stopping", f'must be true, false or "{NEVER}"')


_EARLY_STOPPING_SCHEMA = {"anyOf": [{"type": "boolean"}, {"const": NEVER}]}
EarlyStoppingField = Annotated[
    EarlyStopping, PlainValidator(_parse_early_stopping), JsonSchema(_EARLY_STOPPING_SCHEMA)
]


class CandidateFields(Strict):
    """The number of outputs of a prompt, and the search that finds them."""

    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStoppingField | None = None
    stream: bool | None = None

    @property
    def num_choices(self) -> int:
        """The number of outputs of each prompt that are returned."""
        return 1 if self.n is None else self.n

    @property
    def best(self) -> BestOf:
        """The numbers of sampled outputs that are computed and that are returned."""
        if self.use_beam_search:
            return BestOf(self.num_choices, self.num_choices)
        return BestOf(max(self.best_of or 1, self.num_choices), self.num_choices)

    def check_outputs(self, num_prompts: int) -> None:
        """Raises RequestError for too many outputs or beams of all prompts together."""
        most = max(self.best_of or 1, self.num_choices)
        name = "n" if most == self.num_choices else "best_of"
        limits.check_count(name, num_prompts * most, limits.MAX_OUTPUTS)

    def candidates(self, request: GenerationRequest) -> list[GenerationRequest]:
        """The requests for the outputs of a prompt. Raises RequestError."""
        if self.use_beam_search:
            return [replace(request, beams=self._beams())]
        if self.length_penalty not in (None, 1):
            raise unsupported("length_penalty", "is only for use_beam_search; leave it out or 1")
        if self.early_stopping:
            raise unsupported("early_stopping", "is only for use_beam_search; leave it out")
        if self.best_of is None or self.num_choices < 1:
            return expand(request, self.n)
        if not self.num_choices <= self.best_of <= MAX_CHOICES:
            problem = f"{self.best_of} is outside [{self.num_choices}, {MAX_CHOICES}], from n on"
            raise invalid("best_of", problem)
        if self.stream and self.best.chooses:
            raise unsupported("best_of", "the best of more outputs than n cannot be streamed")
        return expand(self.best.prepare(request), self.best.num_computed)

    def _beams(self) -> BeamOptions:
        if self.stream:
            raise unsupported("use_beam_search", "a beam search cannot be streamed")
        names = BeamNames("n" if self.best_of is None else "best_of")
        return BeamOptions(
            num_beams=self.num_choices if self.best_of is None else self.best_of,
            names=names,
            num_outputs=self.num_choices,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=self.early_stopping or False,
        )
