"""The best of several outputs of a prompt, by the mean log probability of their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.request.generation import GenerationRequest, WholeOutput


@dataclass(frozen=True, slots=True)
class BestOf:
    """The numbers of outputs of each prompt that are computed and that are returned."""

    num_computed: int
    num_returned: int

    @property
    def chooses(self) -> bool:
        """True if fewer are returned than computed."""
        return self.num_returned < self.num_computed

    def prepare(self, request: GenerationRequest) -> GenerationRequest:
        """The request with the log probabilities that the choice needs."""
        if not self.chooses or request.sampling.num_top_logprobs is not None:
            return request
        return replace(request, sampling=replace(request.sampling, num_top_logprobs=0))

    def choose(self, outputs: Sequence[WholeOutput], *, shows_logprobs: bool) -> list[WholeOutput]:
        """The best outputs of each prompt, best first; the outputs of a prompt stand together."""
        if not self.chooses:
            return list(outputs)
        chosen = list[WholeOutput]()
        for begin in range(0, len(outputs), self.num_computed):
            computed = outputs[begin : begin + self.num_computed]
            chosen += sorted(computed, key=_mean_logprob, reverse=True)[: self.num_returned]
        return chosen if shows_logprobs else [_without_logprobs(one) for one in chosen]


def _mean_logprob(output: WholeOutput) -> float:
    total = output.finish.cumulative_logprob or 0.0
    return total / max(output.finish.usage.num_completion_tokens, 1)


def _without_logprobs(output: WholeOutput) -> WholeOutput:
    """The output as it would be if log probabilities had not been asked for."""
    prompt = output.prompt
    if prompt is not None and prompt.echo is not None:
        prompt = replace(prompt, echo=replace(prompt.echo, scores=None))
    return replace(output, logprobs=(), prompt=prompt)
