"""The common path of all generations, for every API.

Validates, tokenizes, submits, detokenizes, matches stop strings and yields deltas. Leaving the
iterator early, for any reason, aborts the request in the scheduler.
"""

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from gateway.callers.auth import CLIENT
from gateway.callers.body_budget import became_tokens
from gateway.callers.grammar_budgets import DEFAULT_LIMITS, GrammarLimits
from gateway.callers.lanes import Lane
from gateway.chat.answer import AnswerReader, ChatFormat
from gateway.chat.conversation import Conversation
from gateway.errors.request_errors import ErrorKind, RequestError, code_of, shown, unsupported
from gateway.observe.end_line import log_end
from gateway.observe.first_token import RecentFirstTokens
from gateway.observe.meter import OutputMeter, RequestMetrics
from gateway.observe.output_span import OutputSpan, OutputTimes
from gateway.pipeline.output_reader import OutputReader
from gateway.request.embeddings import PromptEmbedding, embedding_of
from gateway.request.generation import (
    Finish,
    FinishReason,
    GenerationRequest,
    OutputDelta,
    SamplingParams,
    ServedModel,
    WholeOutput,
    check_token_ids,
    completion_of,
)
from gateway.request.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from gateway.scheduler.link import SchedulerLink
from gateway.scheduler.live_request import LiveRequest, Submission, TokenArrival
from gateway.scheduler.progress import RequestProgress
from gateway.scheduler.readiness import PRIORITY_POLICY, ReadinessWatch
from gateway.structure.calls import CallsInAnswer
from gateway.structure.grammars import GrammarChecker
from gateway.structure.structure import CallList
from gateway.structure.tags import StructuralTags
from gateway.structure.thinking import ThoughtFirst
from gateway.text.hidden_stops import hidden_stops
from gateway.text.logprobs import LogprobReader
from gateway.text.output_text import OutputText
from gateway.text.prompt_outputs import PromptOutputOptions, PromptOutputReader
from gateway.text.stops import StopMatcher
from gateway.tokens.bad_words import with_bad_words
from gateway.tokens.pictures.reader import PictureReader
from gateway.tokens.prompts import TokenizedPrompt, tokenize
from gateway.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from wire.tracing.spans import Tracer

INLINE_VALUES = 1000  # numbers of an answer below which a thread costs more than to write them
Result = TypeVar("Result")


class Pipeline:
    """Owns the requests that are live in this gateway."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        link: SchedulerLink,
        readiness: ReadinessWatch,
        chat_format: ChatFormat,
        clock: Callable[[], float] = time.monotonic,
        sampling_defaults: SamplingDefaults = NO_DEFAULTS,
        metrics: RequestMetrics | None = None,
        tracer: "Tracer | None" = None,
        grammar_limits: GrammarLimits = DEFAULT_LIMITS,
        pictures: PictureReader | None = None,
    ) -> None:
        self.sampling_defaults = sampling_defaults
        self._tokenizer = tokenizer
        self._aside = Lane("answers", 1)
        self.chat_format = chat_format
        self.link = link
        self.readiness = readiness
        self._clock = clock
        self.metrics = metrics or RequestMetrics.unread()
        self._tracer = tracer
        self.first_tokens = RecentFirstTokens()
        self._pictures = pictures
        self._grammars = GrammarChecker(tokenizer.definition, grammar_limits)
        self._live: dict[int, RequestProgress] = {}
        self._num_preparing = 0

    @property
    def num_open(self) -> int:
        """Accepted requests that have not ended; most are live."""
        return self._num_preparing + len(self._live)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Counts a request that is not live yet; until it is, nothing may be awaited outside."""
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    @contextmanager
    def tracking(self, handle: int, progress: RequestProgress) -> Iterator[None]:
        """Counts a request, known by one of its handles, as live."""
        self._live[handle] = progress
        try:
            yield
        finally:
            self._live.pop(handle, None)

    @property
    def live(self) -> list[RequestProgress]:
        """Live requests, oldest first."""
        return list(self._live.values())

    def close(self) -> None:
        """Ends the processes that check grammars and read pictures, and exports the last spans."""
        self._grammars.close()
        if self._pictures is not None:
            self._pictures.close()
        if self._tracer is not None:
            self._tracer.close()

    async def run_aside(self, work: Callable[[], Result]) -> Result:
        """The result of work that would keep the event loop; callers take turns."""
        return await self._aside.run(CLIENT.get(), work)

    def begin_span(self, request: GenerationRequest) -> OutputSpan | None:
        """The span of a request; None when tracing is off."""
        if self._tracer is None:
            return None
        model = self.readiness.current.model
        name = "" if model is None else model.name
        return OutputSpan.begin(self._tracer, request, name, self._clock())

    def now(self) -> float:
        """The clock of Progress, in seconds."""
        return self._clock()

    def resolve_model(self, name: str | None, *, is_accepted: bool = False) -> ServedModel:
        """The model or adapter that a request names. Raises RequestError if it is not served."""
        model = self.readiness.require_model(is_accepted=is_accepted)
        if name is not None and name != model.name:
            for adapter in self.readiness.current.adapters:
                if adapter.name == name:
                    return model.of_adapter(adapter)
            problem = f"model: {shown(name)} is not served here, {model.name!r} is"
            raise RequestError(ErrorKind.MODEL_NOT_FOUND, problem, field="model")
        return model

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[OutputDelta, None]:
        """The output piece by piece; the last delta, and only it, has a finish. Use aclosing().

        Raises RequestError before the first delta when the request is refused.
        """
        meter = OutputMeter(self.metrics, request, self._clock())
        live: LiveRequest | None = None
        finish: Finish | None = None
        progress: RequestProgress | None = None
        error_code, span = "", self.begin_span(request)
        try:
            request = self.sampling_defaults.fill(request)
            with self.preparing():
                submission, new_reader = await self.prepare(request)
            reader = new_reader()
            if span is not None:
                submission = self.traced(submission, span, meter)
            live = self.link.submit(submission)
            progress = RequestProgress(request, reader.num_prompt_tokens, self._clock())
            progress.num_output_tokens = reader.text.num_tokens
            self._live[live.handle] = progress
            while finish is None:
                arrival = await live.receive()
                delta = await self._read(reader, arrival, live.num_cached_tokens)
                progress.num_cached_tokens = live.num_cached_tokens
                num_tokens = reader.text.num_tokens if arrival.token_ids else 0
                is_first = bool(num_tokens) and self._note_tokens(progress, num_tokens, meter)
                finish = delta.finish
                if finish is not None:
                    self.link.close(live)  # at a stop string the scheduler must be stopped
                    meter.finished(finish, self._clock(), live.submitted_s, live.admitted_s)
                    if not request.resume_token_ids:
                        timings = meter.timings(live.queue_s, self._clock())
                        delta = delta._replace(finish=replace(finish, timings=timings))
                yield delta
                if is_first:
                    self.first_tokens.note(progress, live, meter.began_s, self._clock())
        except BaseException as error:
            error_code = code_of(error)
            meter.failed(error_code, self._clock())
            if isinstance(error, RequestError) and request.structure is not None:
                raise error.renamed("grammar", request.structure.place) from error
            raise
        finally:
            if live is not None:
                self._live.pop(live.handle, None)
                self.link.close(live)
            if span is not None:
                span.end(OutputTimes.of(live, progress), finish, error_code, self._clock())
            log_end(request.request_id, finish, error_code)

    async def _read(
        self, reader: OutputReader, arrival: TokenArrival, num_cached_tokens: int
    ) -> OutputDelta:
        if reader.num_values <= INLINE_VALUES:
            return reader.read(arrival, num_cached_tokens)
        return await self.run_aside(partial(reader.read, arrival, num_cached_tokens))

    def traced(self, submission: Submission, span: OutputSpan, meter: OutputMeter) -> Submission:
        """The submission under the span, now that it is prepared."""
        span.prepared(meter.began_s, self._clock(), len(submission.prompt_token_ids))
        standing = replace(submission.standing, trace=span.context)
        return replace(submission, standing=standing)

    def _note_tokens(self, progress: RequestProgress, num_tokens: int, meter: OutputMeter) -> bool:
        """Counts what has come; True for the first tokens."""
        now_s = self._clock()
        if is_first := progress.first_token_s is None:
            progress.first_token_s = now_s
            meter.admitted(progress.num_prompt_tokens, progress.num_cached_tokens)
        meter.received(num_tokens - progress.num_output_tokens, now_s)
        progress.num_output_tokens = num_tokens
        return is_first

    async def prepare(
        self, request: GenerationRequest
    ) -> tuple[Submission, Callable[[], OutputReader]]:
        """The submission for the scheduler, and what makes readers of its results.

        Raises RequestError.
        """
        model = self.resolve_model(request.model, is_accepted=request.is_accepted)
        self._check_priority(request)
        request.check(model.vocab_size)
        request = self._with_structure(request)
        prompt = await self._tokenize(request, model)
        became_tokens(len(prompt.text) or len(prompt.token_ids))
        request = self._with_thought(request, prompt)
        wanted_outputs = self._prompt_output_options(request, prompt)
        sampling = await with_bad_words(self._tokenizer, request.sampling, request.bad_words)
        sampling = replace(sampling, num_prompt_logprobs=wanted_outputs.most_top)
        if request.structure is not None:
            grammar = await self._grammars.resolve(
                request.structure, model.vocab_size, model.eos_token_ids
            )
            sampling = replace(sampling, grammar=grammar)
        if request.resume_token_ids:
            check_token_ids("resume_token_ids", request.resume_token_ids, model.vocab_size)
        submission = Submission(
            request.request_id,
            prompt.token_ids,
            sampling,
            request.standing,
            request.reuse,
            output_token_ids=request.resume_token_ids,
            num_deaths=request.num_deaths,
            adapter=model.adapter,
            pictures=prompt.pictures,
        )
        return submission, partial(self._reader, request, prompt, wanted_outputs)

    def _reader(
        self, request: GenerationRequest, prompt: TokenizedPrompt, outputs: PromptOutputOptions
    ) -> OutputReader:
        """A reader of one output. Raises RequestError when what it resumes had ended."""
        reader = OutputReader(
            self._output_text(request, prompt),
            len(prompt.token_ids),
            self._logprob_reader(request, len(outputs.echo or "")),
            self._answer_reader(request, prompt),
            self._prompt_output_reader(request, prompt, outputs),
            counts_usage=request.counts_usage,
        )
        if request.resume_token_ids:
            reader.catch_up(request.resume_token_ids)
        return reader

    def _check_priority(self, request: GenerationRequest) -> None:
        """Raises RequestError for a priority that the scheduler would ignore."""
        priority, policy = request.standing.priority, self.readiness.current.policy
        if priority and policy not in ("", PRIORITY_POLICY):  # empty: not reported
            problem = f"{priority} is of no use: the scheduler's policy is {policy}; send 0 or none"
            raise unsupported("priority", problem)

    def _with_structure(self, request: GenerationRequest) -> GenerationRequest:
        """A chat with the structure that its tools require. Raises RequestError."""
        if isinstance(request.structure, StructuralTags):
            tags = self.chat_format.with_markers(request.structure)
            request = replace(request, structure=tags)
        chat = request.prompt
        if not isinstance(chat, Conversation):
            return request
        self.chat_format.check(chat)
        asked = request.structure
        others = (CallList, CallsInAnswer, ThoughtFirst)
        assert not isinstance(asked, others), "these come from the conversation alone"
        return replace(request, structure=self.chat_format.structure(chat, asked))

    def _with_thought(
        self, request: GenerationRequest, prompt: TokenizedPrompt
    ) -> GenerationRequest:
        """A chat with the reasoning that precedes its structure. Raises RequestError."""
        chat, answer = request.prompt, request.structure
        if not isinstance(chat, Conversation):
            return request
        assert not isinstance(answer, ThoughtFirst), "this comes from the prompt alone"
        structure = self.chat_format.with_thought(chat, prompt.text, answer)
        return replace(request, structure=structure)

    def _answer_reader(
        self, request: GenerationRequest, prompt: TokenizedPrompt
    ) -> AnswerReader | None:
        if not isinstance(request.prompt, Conversation):
            return None
        return self.chat_format.reader(request.prompt, prompt.text, request.structure)

    def _output_text(self, request: GenerationRequest, prompt: TokenizedPrompt) -> OutputText:
        chat, shown_tokens = request.prompt, tuple[str, ...]()
        if isinstance(chat, Conversation):
            shown_tokens = self.chat_format.shown_tokens(chat)
        skips = request.skip_special_tokens
        detokenizer = self._tokenizer.detokenizer(
            skip_special_tokens=skips, shown_tokens=shown_tokens
        )
        if not request.stop:
            return OutputText(detokenizer, None)
        hidden = hidden_stops(
            request.stop,
            self._tokenizer.hidden_tokens(skip_special_tokens=skips, shown_tokens=shown_tokens),
        )
        stretches = None
        if isinstance(chat, Conversation):
            stretches = self.chat_format.stretches(chat, prompt.text, request.structure)
        include = request.include_stop_str_in_output
        stops = StopMatcher(request.stop, include_in_output=include, others=hidden.patterns)
        min_tokens = request.sampling.min_tokens or 0
        return OutputText(detokenizer, stops, min_tokens, stretches, hidden)

    async def _tokenize(self, request: GenerationRequest, model: ServedModel) -> TokenizedPrompt:
        samples_nothing = request.sampling.max_tokens == 0 or request.pooling is not None
        may_have_pictures = model.takes_pictures and request.pooling is None
        return await tokenize(
            self._tokenizer,
            request.prompt,
            model,
            request.add_special_tokens,
            num_output_tokens=0 if samples_nothing else 1,
            truncation=request.truncation,
            pictures=self._pictures if may_have_pictures else None,
        )

    def _prompt_output_options(
        self, request: GenerationRequest, prompt: TokenizedPrompt
    ) -> PromptOutputOptions:
        echo = None
        if request.echo:
            skips, decode = request.skip_special_tokens, self._tokenizer.decode
            echo = prompt.text or decode(prompt.token_ids, skip_special_tokens=skips)
        sampling = request.sampling
        return PromptOutputOptions(sampling.num_prompt_logprobs, echo, sampling.num_top_logprobs)

    def _prompt_output_reader(
        self,
        request: GenerationRequest,
        prompt: TokenizedPrompt,
        wanted_outputs: PromptOutputOptions,
    ) -> PromptOutputReader | None:
        wants_scores = wanted_outputs.echo is not None or wanted_outputs.most_top is not None
        if not wants_scores and not request.returns_prompt_ids:
            return None
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens)
        spell = self._tokenizer.spell
        return PromptOutputReader(wanted_outputs, prompt.token_ids, spell, detokenizer)

    def _logprob_reader(self, request: GenerationRequest, text_offset: int) -> LogprobReader | None:
        num_top = request.sampling.num_top_logprobs
        if num_top is None:
            return None
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens)
        named = request.sampling.logprob_token_ids
        return LogprobReader(self._tokenizer.spell, detokenizer, num_top, text_offset, named)

    async def embed(self, request: GenerationRequest) -> PromptEmbedding:
        """The pooled hidden states of a prompt, by the request's `pooling`."""
        assert request.pooling is not None
        meter = OutputMeter(self.metrics, request, self._clock())
        span, end = self.begin_span(request), None
        if span is not None:
            standing = replace(request.standing, trace=span.context)
            request = replace(request, standing=standing)
        error_code = ""
        try:
            arrival = await self._embed(request)
            if arrival.end is None or arrival.end.reason is FinishReason.ABORT:
                raise RequestError(ErrorKind.CANCELLED, "the request was aborted")
            end = arrival.end
        except BaseException as error:
            error_code = code_of(error)
            meter.failed(error_code, self._clock())
            raise
        finally:
            if span is not None:
                span.end(OutputTimes(), end, error_code, self._clock())
            log_end(request.request_id, end, error_code)
        meter.finished(arrival.end, self._clock())
        return embedding_of(arrival.prompt_outputs, arrival.end.usage)

    async def _embed(self, request: GenerationRequest) -> TokenArrival:
        model = self.resolve_model(request.model, is_accepted=request.is_accepted)
        self._check_priority(request)
        with self.preparing():
            prompt = await self._tokenize(request, model)
        live = self.link.submit(
            Submission(
                request.request_id,
                prompt.token_ids,
                SamplingParams(),
                request.standing,
                request.reuse,
                request.pooling,
                adapter=model.adapter,
            )
        )
        progress = RequestProgress(request, len(prompt.token_ids), self._clock())
        try:
            with self.tracking(live.handle, progress):
                return await live.receive()
        finally:
            self.link.close(live)

    async def complete(self, request: GenerationRequest) -> WholeOutput:
        """The whole output at once."""
        async with aclosing(self.generate(request)) as deltas:
            return completion_of([delta async for delta in deltas])
