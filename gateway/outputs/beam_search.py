"""Runs a beam search: for every token a round of requests, one for each running beam.

A round's requests bring the output of their beam so far, sample one token and report the likeliest
ones. To the scheduler they are requests that continue, as after the loss of another scheduler:
never refused for overload, preempted, recovered and migrated like all others. The prefix cache has
the KV of what is common to the beams. Nothing is kept between the rounds but token ids, so nothing
has to be freed: however the search ends, it has at most one round of live requests, and they are
closed.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gateway.errors.request_errors import ErrorKind, RequestError, code_of, unsupported
from gateway.observe.end_line import log_end
from gateway.observe.meter import OutputMeter
from gateway.observe.output_span import OutputTimes
from gateway.outputs.hypotheses import Beam, FinishedBeam, Hypotheses
from gateway.outputs.rules import check_beams, check_candidates
from gateway.pipeline.output_reader import OutputReader
from gateway.pipeline.pipeline import Pipeline
from gateway.request.generation import (
    Finish,
    FinishReason,
    GenerationRequest,
    OutputTimings,
    PrefixReuse,
    SamplingParams,
    ServedModel,
    Usage,
    WholeOutput,
    completion_of,
)
from gateway.request.sampling_defaults import SamplingDefaults
from gateway.scheduler.live_request import LiveRequest, Submission, TokenArrival
from gateway.scheduler.progress import RequestProgress
from gateway.text.logprobs import RawLogprobs


async def search(pipeline: Pipeline, request: GenerationRequest) -> list[WholeOutput]:
    """The best outputs of a request with beams, best first. Raises RequestError."""
    meter = OutputMeter(pipeline.metrics, request, pipeline.now())
    span = pipeline.begin_span(request)
    run: _Run | None = None
    finish: Finish | None = None
    error_code = ""
    try:
        check_beams(request)
        # The model's other defaults are for sampling.
        limit = SamplingDefaults(max_tokens=pipeline.sampling_defaults.max_tokens)
        request = limit.fill(request)
        with pipeline.preparing():
            model = pipeline.resolve_model(request.model, is_accepted=request.is_accepted)
            submission, new_reader = await pipeline.prepare(request)
        if span is not None:
            submission = pipeline.traced(submission, span, meter)
        run = _Run(pipeline, request, model, submission, meter)
        await run.search()
        outputs = run.outputs(new_reader)
        finish = outputs[0].finish
        meter.finished(finish, pipeline.now())
        return outputs
    except BaseException as error:
        error_code = code_of(error)
        meter.failed(error_code, pipeline.now())
        raise
    finally:
        if span is not None:
            times = OutputTimes() if run is None else OutputTimes.of(run.first, run.progress)
            span.end(times, finish, error_code, pipeline.now())
        log_end(request.request_id, finish, error_code)


@dataclass(frozen=True, slots=True)
class _EndIds:
    """Tokens that end an output."""

    eos: frozenset[int]
    stops: frozenset[int]

    @classmethod
    def of(cls, sampling: SamplingParams, model: ServedModel) -> "_EndIds":
        eos = () if sampling.ignore_eos else model.eos_token_ids
        return cls(frozenset(eos), frozenset(sampling.stop_token_ids))


class _Run:
    """One beam search, from its first request to its outputs."""

    def __init__(
        self,
        pipeline: Pipeline,
        request: GenerationRequest,
        model: ServedModel,
        submission: Submission,
        meter: OutputMeter,
    ) -> None:
        assert request.beams is not None
        if submission.sampling.grammar:
            raise unsupported(request.beams.names.num_beams, "cannot go with a grammar")
        if submission.reuse.skip_prefix_cache:  # its own rounds share what no other may find
            submission = replace(submission, reuse=PrefixReuse(uuid.uuid4().hex))
        # Its rounds are no turns of a session.
        submission = replace(submission, reuse=replace(submission.reuse, session=None))
        self._pipeline = pipeline
        self._request = request
        self._submission = submission
        self._meter = meter
        self._end_ids = _EndIds.of(request.sampling, model)
        self._num_prompt = len(submission.prompt_token_ids)
        room = model.max_model_len - self._num_prompt
        asked = request.sampling.max_tokens
        most = room if asked is None else min(asked, room)
        self._search = Hypotheses(request.beams, self._end_ids.eos | self._end_ids.stops, most)
        check_candidates(
            self._search.num_candidates, model.vocab_size, request.beams.names.num_beams
        )
        self._began_s = pipeline.now()
        self.progress = RequestProgress(request, self._num_prompt, self._began_s)
        self.first: LiveRequest | None = None

    async def search(self) -> None:
        """Runs rounds until the search is over. Raises RequestError."""
        self.first = self._submit(0, Beam())
        with self._pipeline.tracking(self.first.handle, self.progress):
            self._advance(await self._rows([self.first]))
            while not self._search.is_over:
                self._advance(await self._next_rows())

    def _advance(self, rows: Sequence[RawLogprobs]) -> None:
        progress, now_s = self.progress, self._pipeline.now()
        if progress.first_token_s is None:
            assert self.first is not None
            progress.first_token_s = now_s
            progress.num_cached_tokens = self.first.num_cached_tokens
            self._meter.admitted(self._num_prompt, progress.num_cached_tokens)
        self._search.advance(rows)
        progress.num_output_tokens = self._search.num_tokens
        self._meter.received(1, now_s)

    async def _next_rows(self) -> list[RawLogprobs]:
        """The likeliest tokens after each running beam."""
        lives = list[LiveRequest]()
        try:
            for index, beam in enumerate(self._search.running):
                lives.append(self._submit(index, beam))
        except BaseException:
            self._close(lives)
            raise
        return await self._rows(lives)

    async def _rows(self, lives: Sequence[LiveRequest]) -> list[RawLogprobs]:
        try:
            return [await _row(live) for live in lives]
        finally:
            self._close(lives)

    def _close(self, lives: Sequence[LiveRequest]) -> None:
        for live in lives:
            self._pipeline.link.close(live)

    def _submit(self, index: int, beam: Beam) -> LiveRequest:
        """Submits a beam's request of the round. Raises RequestError."""
        output = beam.token_ids
        sampling = SamplingParams(
            temperature=0,
            max_tokens=len(output) + 1,
            ignore_eos=True,
            num_top_logprobs=self._search.num_candidates,
        )
        standing, first = self._submission.standing, self._submission
        if standing.timeout_s is not None:
            spent_s = self._pipeline.now() - self._began_s
            standing = replace(standing, timeout_s=standing.timeout_s - spent_s)
        submission = replace(
            first,
            # The first beam's requests can be found and aborted by the caller's id.
            request_id=f"{first.request_id}-{index}" if index else first.request_id,
            sampling=sampling,
            standing=standing,
            output_token_ids=output,
            num_deaths=0 if output else first.num_deaths,
            was_accepted=bool(output),
        )
        return self._pipeline.link.submit(submission)

    def outputs(self, new_reader: Callable[[], OutputReader]) -> list[WholeOutput]:
        """The best finished outputs, best first."""
        assert self._request.beams is not None and self.first is not None
        timings = self._meter.timings(self.first.queue_s, self._pipeline.now())
        best = self._search.finished[: self._request.beams.num_outputs]
        return [self._output(one, new_reader(), timings) for one in best]

    def _output(
        self, one: FinishedBeam, reader: OutputReader, timings: OutputTimings
    ) -> WholeOutput:
        token_ids, num_cached = list(one.beam.token_ids), self.progress.num_cached_tokens
        is_stop_token = one.is_stopped and token_ids[-1] not in self._end_ids.eos
        end = Finish(
            FinishReason.STOP if one.is_stopped else FinishReason.LENGTH,
            Usage(self._num_prompt, len(token_ids), num_cached),
            stop_token_id=token_ids[-1] if is_stop_token else None,
        )
        delta = reader.read(TokenArrival(token_ids, one.beam.logprobs, end), num_cached)
        assert delta.finish is not None, "a beam's output ended without a finish"
        finish = replace(delta.finish, timings=timings, cumulative_logprob=one.beam.total)
        return completion_of([delta._replace(finish=finish)])


async def _row(live: LiveRequest) -> RawLogprobs:
    """The likeliest tokens that a round's request reports. Raises RequestError."""
    rows = list[RawLogprobs]()
    end: Finish | None = None
    while end is None:
        arrival = await live.receive()
        rows += arrival.logprobs
        end = arrival.end
    if end.reason is FinishReason.ABORT:
        raise RequestError(ErrorKind.CANCELLED, "the request was aborted")
    if not rows:
        raise RequestError(ErrorKind.INTERNAL, "the scheduler sent tokens without logprobs")
    return rows[0]
