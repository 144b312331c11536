"""Converts between protobuf messages and the gateway's values, one function per direction."""

from collections.abc import Sequence
from dataclasses import replace

from gateway.chat.convert import add_parts, add_reply
from gateway.errors.request_errors import RequestError, from_grpc_code, invalid
from gateway.request.beam_options import NEVER, BeamNames, BeamOptions, EarlyStopping
from gateway.request.generation import (
    Finish,
    FinishReason,
    GenerationRequest,
    OutputDelta,
    PrefixReuse,
    Prompt,
    PromptPooling,
    SamplingParams,
    ServedModel,
    Standing,
    Usage,
    WholeOutput,
)
from gateway.scheduler.live_request import Submission
from gateway.scheduler.session_convert import session_from_proto, session_to_proto
from gateway.structure import json_schema, tags
from gateway.structure.structure import (
    ANY_OBJECT,
    ContextFree,
    JsonSchema,
    OneOfTexts,
    Regex,
)
from gateway.structure.tags import Asked, StructuralTags
from gateway.text.logprobs import OutputTokenLogprobs, RawLogprobs, raw_logprobs
from gateway.text.prompt_outputs import PromptOutputs
from gateway.tokens.placeholders import PictureInPrompt
from pagewire.v1 import inference_pb2, scheduler_pb2, types_pb2
from wire import columns
from wire.logprobs import LogprobColumns
from wire.tracing.context import TraceContext

REASON_TO_PROTO = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: types_pb2.FINISH_REASON_ABORT,
}
POOLING_TO_PROTO = {
    None: types_pb2.POOLING_UNSPECIFIED,
    PromptPooling.LAST: types_pb2.POOLING_LAST,
    PromptPooling.MEAN: types_pb2.POOLING_MEAN,
}
POOLING_FROM_PROTO = {number: pooling for pooling, number in POOLING_TO_PROTO.items()}
REASON_FROM_PROTO = {number: reason for reason, number in REASON_TO_PROTO.items()}
_BEAM_NAMES = BeamNames("beam_search.num_beams", "n", "beam_search.length_penalty")
_EARLY_STOPPING: dict[int, EarlyStopping] = {
    inference_pb2.EARLY_STOPPING_UNSPECIFIED: False,
    inference_pb2.EARLY_STOPPING_FALSE: False,
    inference_pb2.EARLY_STOPPING_TRUE: True,
    inference_pb2.EARLY_STOPPING_NEVER: NEVER,
}

_OPTIONAL_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "skip_speculation",
)


def sampling_to_proto(sampling: SamplingParams) -> types_pb2.SamplingParams:
    """Sampling parameters for the scheduler; absent fields stay absent."""
    values = {name: getattr(sampling, name) for name in _OPTIONAL_SAMPLING}
    return types_pb2.SamplingParams(
        stop_token_ids=sampling.stop_token_ids,
        logit_bias=[types_pb2.LogitBias(token_id=i, bias=b) for i, b in sampling.logit_bias],
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words_token_ids=[
            types_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words_token_ids
        ],
        logprobs=sampling.num_top_logprobs,
        logprob_token_ids=sampling.logprob_token_ids,
        prompt_logprobs=sampling.num_prompt_logprobs,
        grammar=sampling.grammar,
        **values,
    )


def sampling_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """Sampling parameters from a gRPC client."""
    if message.grammar:
        raise invalid("sampling.grammar", "is for workers; set structured_output")
    values = {name: getattr(message, name) for name in _OPTIONAL_SAMPLING if message.HasField(name)}
    return SamplingParams(
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words_token_ids=tuple(tuple(word.token_ids) for word in message.bad_words_token_ids),
        num_top_logprobs=message.logprobs if message.HasField("logprobs") else None,
        logprob_token_ids=tuple(message.logprob_token_ids),
        num_prompt_logprobs=(
            message.prompt_logprobs if message.HasField("prompt_logprobs") else None
        ),
        **values,
    )


def submit_to_proto(
    handle: int, wanted: Submission, *, is_again: bool = False
) -> scheduler_pb2.SessionRequest:
    """A request for the scheduler: a new one, or with `is_again` one that continues its output."""
    sampling, standing, reuse = wanted.sampling, wanted.standing, wanted.reuse
    output = wanted.output_token_ids
    if output:  # prompt outputs were delivered before the first token
        sampling = replace(sampling, num_prompt_logprobs=None)
    submit = scheduler_pb2.Submit(
        handle=handle,
        request_id=standing.scoped(wanted.request_id),
        prompt_token_ids=columns.pack([*wanted.prompt_token_ids, *output]),
        num_prompt_tokens=len(wanted.prompt_token_ids) if output or is_again else None,
        resumed_by_client=bool(output) and not (is_again or wanted.was_accepted),
        sampling=sampling_to_proto(sampling),
        priority=standing.priority,
        tenant=standing.tenant,
        timeout_s=standing.timeout_s,
        cache_salt=standing.scoped_salt(reuse.cache_salt),
        skip_prefix_cache=reuse.skip_prefix_cache,
        fork_group="" if output else reuse.fork_group,
        pooling=POOLING_TO_PROTO[wanted.pooling],
        pictures=_pictures_to_proto(wanted.pictures),
        num_deaths=wanted.num_deaths,
        trace=None if standing.trace is None else _trace_to_proto(standing.trace),
        adapter=None if wanted.adapter is None else types_pb2.Adapter(**wanted.adapter.fields()),
        session=None if reuse.session is None else session_to_proto(reuse.session),
    )
    return scheduler_pb2.SessionRequest(submit=submit)


def _pictures_to_proto(pictures: Sequence[PictureInPrompt]) -> list[types_pb2.Picture]:
    """The pictures of a prompt; of equal ones the first alone has its pixels."""
    made, sent = [], set[bytes]()
    for placed in pictures:
        picture = placed.picture
        message = types_pb2.Picture(
            position=placed.position,
            num_tokens=picture.num_tokens,
            content_id=picture.content_id,
        )
        if picture.content_id not in sent:
            sent.add(picture.content_id)
            message.pixels.CopyFrom(
                types_pb2.PicturePixels(
                    values=picture.pixels.values,
                    num_rows=picture.pixels.num_rows,
                    grid=picture.pixels.grid or (),
                    means=picture.settings.means,
                    deviations=picture.settings.deviations,
                )
            )
        made.append(message)
    return made


def _trace_to_proto(trace: TraceContext) -> types_pb2.TraceContext:
    return types_pb2.TraceContext(traceparent=trace.traceparent, tracestate=trace.tracestate)


def hello_to_proto(gateway: int) -> scheduler_pb2.SessionRequest:
    """The first message of a stream: who opens it."""
    return scheduler_pb2.SessionRequest(hello=scheduler_pb2.SessionHello(gateway=gateway))


def instance_of(message: scheduler_pb2.SessionResponse) -> int | None:
    """The scheduler that answers a hello; 0: one that does not know hellos. None: no answer yet."""
    if message.HasField("greeting"):
        return message.greeting.instance
    return 0 if any(finished.handle == 0 for finished in message.finished) else None


def abort_to_proto(handle: int) -> scheduler_pb2.SessionRequest:
    """An abort, for the scheduler."""
    return scheduler_pb2.SessionRequest(abort=scheduler_pb2.AbortHandle(handle=handle))


def finished_from_proto(message: scheduler_pb2.Finished) -> Finish | RequestError:
    """The end of a request, from the scheduler."""
    reason = REASON_FROM_PROTO.get(message.reason)
    if reason is None:
        retry_after_s = message.retry_after_s if message.HasField("retry_after_s") else None
        problem = message.message or "the request failed"
        return from_grpc_code(message.status_code, problem, retry_after_s)
    stop_token_id = message.stop_token_id if message.HasField("stop_token_id") else None
    return Finish(reason, usage_from_proto(message.usage), stop_token_id=stop_token_id)


def logprobs_from_proto(message: scheduler_pb2.SessionResponse) -> dict[int, RawLogprobs]:
    """Log probabilities by position among the message's tokens. Raises columns.BadColumn."""
    if not message.HasField("logprobs"):
        return {}
    num_tokens = len(message.token_ids) // columns.INT32.itemsize
    table = LogprobColumns.unpack(message.logprobs, num_tokens)
    if table is None:
        return {}
    return dict(zip(table.rows.tolist(), raw_logprobs(table), strict=True))


def _logprobs_to_proto(logprobs: Sequence[OutputTokenLogprobs]) -> list[types_pb2.TokenLogprobs]:
    return [
        types_pb2.TokenLogprobs(
            logprob=token.sampled.logprob,
            rank=token.sampled.rank,
            top_token_ids=[top.token_id for top in token.top],
            top_logprobs=[top.logprob for top in token.top],
        )
        for token in logprobs
    ]


def usage_from_proto(message: types_pb2.Usage) -> Usage:
    """Token counts from the scheduler."""
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_tokens)


def usage_to_proto(usage: Usage) -> types_pb2.Usage:
    """Token counts for a gRPC client."""
    return types_pb2.Usage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_completion_tokens,
        cached_tokens=usage.num_cached_tokens,
    )


def model_from_proto(message: types_pb2.ModelInfo, served_name: str | None) -> ServedModel:
    """The model that the scheduler serves; `served_name` replaces its name if given."""
    return ServedModel(
        name=served_name or message.model,
        architecture=message.architecture,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        config_sha256=message.config_sha256,
        tokenizer_sha256=message.tokenizer_sha256,
        dtype=message.dtype,
        llguidance_version=message.llguidance_version,
        quantization=message.quantization,
        takes_pictures=message.takes_pictures,
    )


def model_to_proto(model: ServedModel) -> types_pb2.ModelInfo:
    """The served model for a gRPC client."""
    return types_pb2.ModelInfo(
        model=model.name,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        config_sha256=model.config_sha256,
        tokenizer_sha256=model.tokenizer_sha256,
        dtype=model.dtype,
        llguidance_version=model.llguidance_version,
        quantization=model.quantization,
        parent=model.parent,
        takes_pictures=model.takes_pictures,
    )


def prompt_from_proto(message: inference_pb2.Prompt, name: str = "prompt") -> Prompt:
    """The prompt from a gRPC client. Raises RequestError naming the field `name`."""
    match message.WhichOneof("input"):
        case "text":
            return message.text
        case "token_ids":
            return tuple(message.token_ids.ids)
        case _:
            raise invalid(name, "set either text or token_ids")


def request_from_proto(
    request_id: str,
    prompt: Prompt,
    options: inference_pb2.GenerationOptions,
    standing: Standing,
) -> GenerationRequest:
    """The request from a gRPC client."""
    skips = options.skip_special_tokens if options.HasField("skip_special_tokens") else True
    return GenerationRequest(
        request_id=request_id,
        prompt=prompt,
        sampling=sampling_from_proto(options.sampling),
        stop=tuple(options.stop),
        include_stop_str_in_output=options.include_stop_str_in_output,
        skip_special_tokens=skips,
        standing=standing,
        model=options.model or None,
        bad_words=tuple(options.bad_words),
        reuse=PrefixReuse(
            options.cache_salt,
            options.skip_prefix_cache,
            session=session_from_proto(options.session) if options.HasField("session") else None,
        ),
        structure=structure_from_proto(options),
        resume_token_ids=tuple(options.resume_token_ids),
        num_deaths=options.num_deaths,
        beams=_beams_from_proto(options),
    )


def _beams_from_proto(options: inference_pb2.GenerationOptions) -> BeamOptions | None:
    """The beam search from a gRPC client; None without one."""
    if not options.HasField("beam_search"):
        return None
    asked = options.beam_search
    return BeamOptions(
        num_beams=asked.num_beams,
        names=_BEAM_NAMES,
        num_outputs=options.n if options.HasField("n") else 1,
        length_penalty=asked.length_penalty if asked.HasField("length_penalty") else 1.0,
        early_stopping=_EARLY_STOPPING[asked.early_stopping],
    )


def resumed_from_proto(options: inference_pb2.GenerationOptions) -> list[tuple[int, ...] | None]:
    """The tokens that a caller has of each output of a broken stream; None for a whole one."""
    return [None if one.is_finished else tuple(one.token_ids) for one in options.resume_outputs]


def structure_from_proto(options: inference_pb2.GenerationOptions) -> Asked | None:
    """The required structure of the output from a gRPC client; None without one."""
    if not options.HasField("structured_output"):
        return None
    form, name = options.structured_output, options.structured_output.WhichOneof("form")
    place = f"structured_output.{name}"
    whitespace = form.whitespace_pattern if form.HasField("whitespace_pattern") else None
    if whitespace is not None and name not in ("json_schema", "json_object"):
        raise invalid("structured_output.whitespace_pattern", "is for JSON alone")
    match name:
        case "json_schema":
            schema = json_schema.parse(form.json_schema, place)
            return JsonSchema(place, schema, whitespace)
        case "json_object":
            return JsonSchema(place, ANY_OBJECT, whitespace)
        case "regex":
            return Regex(place, form.regex)
        case "choice":
            return OneOfTexts(f"{place}.options", tuple(form.choice.options))
        case "grammar":
            return ContextFree(place, form.grammar)
        case "structural_tag":
            return StructuralTags(place, tags.parse(form.structural_tag, place))
        case _:
            forms = "json_schema, json_object, regex, choice, grammar or structural_tag"
            raise invalid("structured_output", f"set one of {forms}")


def num_choices_from_proto(options: inference_pb2.GenerationOptions) -> int | None:
    """The number of outputs from a gRPC client; None if not given."""
    return options.n if options.HasField("n") else None


def write_delta(message: inference_pb2.OutputDelta, delta: OutputDelta, index: int) -> None:
    """Fills an empty message with a piece of an output.

    In place: a message made here would be copied into the one that is sent.
    """
    message.text = delta.text
    message.token_ids.extend(delta.token_ids)
    message.index = index
    if delta.logprobs:
        message.logprobs.extend(_logprobs_to_proto(delta.logprobs))
    if delta.prompt is not None:
        _add_prompt(message, delta.prompt)
    if delta.parts is not None:
        add_parts(message, delta.parts)
    if delta.finish is not None:
        _add_finish(message, delta.finish)


def output_to_proto(completion: WholeOutput, index: int = 0) -> inference_pb2.Output:
    """A whole output for a gRPC client."""
    message = inference_pb2.Output(
        text=completion.text,
        token_ids=completion.token_ids,
        logprobs=_logprobs_to_proto(completion.logprobs),
        index=index,
    )
    if completion.prompt is not None:
        _add_prompt(message, completion.prompt)
    if completion.parts is not None:
        add_reply(message, completion.reply)
    _add_finish(message, completion.finish)
    return message


def _add_prompt(
    message: inference_pb2.OutputDelta | inference_pb2.Output, outputs: PromptOutputs
) -> None:
    if outputs.scores is not None:
        message.prompt_token_ids.extend(outputs.token_ids)
        message.prompt_logprobs.extend(_logprobs_to_proto(outputs.scores.others))


def _add_finish(message: inference_pb2.OutputDelta | inference_pb2.Output, finish: Finish) -> None:
    message.finish_reason = REASON_TO_PROTO[finish.reason]
    message.usage.CopyFrom(usage_to_proto(finish.usage))
    if finish.stop_string is not None:
        message.stop_string = finish.stop_string
    if finish.stop_token_id is not None:
        message.stop_token_id = finish.stop_token_id
    if finish.cumulative_logprob is not None:
        message.cumulative_logprob = finish.cumulative_logprob
    if (timings := finish.timings) is not None:
        message.timings.total_s = timings.total_s
        for name in ("queue_s", "first_token_s", "per_token_s"):
            if (seconds := getattr(timings, name)) is not None:
                setattr(message.timings, name, seconds)
