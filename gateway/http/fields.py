"""Fields that this gateway does not implement, and how each is handled.

A field that asks for nothing is accepted: null, a value that means "off" (neutral), and hints that
only tune costs or are the caller's bookkeeping (harmless). A known field with another value would
change an answer, so it is refused by its name. A field that no table knows is accepted with a
notice, or refused where nothing collects notices.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic_core import PydanticCustomError

from gateway.errors import notices
from gateway.errors.request_errors import ErrorKind, RequestError, invalid, unsupported

Neutral = Mapping[str, tuple[Any, ...]]
UNSUPPORTED_FIELD = "unsupported_field"  # type of the validation error; its context has the name

# Accepted with any value and ignored: without effect on the output.
HARMLESS = frozenset(
    {"metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"prompt_cache_options", "service_tier", "session_id", "cache_control"}
    | {"parent_session_id", "agent_hint"}
)
GENERATION_HARMLESS = HARMLESS | {"guided_decoding_backend", "stream_interval"}
CHAT_HARMLESS = GENERATION_HARMLESS | {"prediction", "verbosity", "store"}
RESPONSE_HARMLESS = HARMLESS | {"client_metadata", "max_tool_calls"}

# Field -> values that change nothing. Null is accepted everywhere.
_BOTH: dict[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "extra_args": ({},),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_mm_kwargs": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "watermarking": (False,),
    "detokenize": (True,),
}

# vLLM's, for the chat template or for media: the model's own template is used, on text.
_RENDERING: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}

CHAT: dict[str, tuple[Any, ...]] = (
    _BOTH
    | _RENDERING
    | {
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "moderation": (),
        "return_prompt_text": (False,),
    }
)

COMPLETION: dict[str, tuple[Any, ...]] = _BOTH | {
    "suffix": ("",),
    "thinking_token_budget": (-1,),
}

EMBEDDING: dict[str, tuple[Any, ...]] = _RENDERING | {
    "messages": (),
    "add_generation_prompt": (False,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "use_activation": (True,),
}

SCORE: dict[str, tuple[Any, ...]] = _RENDERING | {
    "max_tokens_per_doc": (),
    "max_tokens_per_query": (),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),
    "use_activation": (True,),
    "chat_template_kwargs": ({},),
}

RERANK: dict[str, tuple[Any, ...]] = SCORE | {"max_chunks_per_doc": (), "rank_fields": ()}

TOKENIZE = _RENDERING | {"return_token_strs": (False,)}

STRUCTURED_OUTPUTS: dict[str, tuple[Any, ...]] = {
    "disable_additional_properties": (False,),
}

RESPONSE: dict[str, tuple[Any, ...]] = {
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "vllm_xargs": ({},),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "enable_response_messages": (False,),
    "previous_input_messages": (),
    "watermarking": (False,),
    "background_options": ({}, {"completion_window": "soonest"}),
    "context_management": ([],),
    "conversation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled", "auto"),
    "access_programs": ([],),
    "image": (),
    "moderation": (),
}

# Of Cohere's API.
COHERE_EMBED: dict[str, tuple[Any, ...]] = {"images": ([],)}
COHERE_CHAT: dict[str, tuple[Any, ...]] = {
    "citation_options": ({}, {"mode": "OFF"}, {"mode": "DISABLED"}),
    "safety_mode": ("OFF", "NONE", "CONTEXTUAL"),
    "raw_prompting": (False,),
}

POOLING: dict[str, tuple[Any, ...]] = EMBEDDING | {"softmax": (), "activation": ()}

# Of Anthropic's API.
MESSAGES: dict[str, tuple[Any, ...]] = {
    "billing_policy": ({"type": "billing_policy", "bill_to": "self"},),
    "compaction": (),
    "container": (),
    "fallbacks": ([],),
    "fallback_credit_token": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
}
MESSAGES_HARMLESS = (HARMLESS - {"metadata"}) | {"diagnostics", "user_profile_id", "workspace_id"}

MESSAGE: dict[str, tuple[Any, ...]] = {"function_call": (), "audio": ()}

# What other servers read and no table above names: each would change the output. With the values
# that ask for nothing; so do empty lists, objects and texts.
ELSEWHERE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("lora", "lora_request", "lora_path", "lora_name", "lora_id"), ()),
    **dict.fromkeys(("adapter", "adapters", "adapter_id", "adapter_name", "adapter_source"), ()),
    **dict.fromkeys(("prompt_adapter_request", "control_vectors", "steering_vectors"), ()),
    **dict.fromkeys(("image_data", "audio_data", "video_data", "images", "input_embeds"), ()),
    **dict.fromkeys(("multi_modal_data", "regex", "ebnf", "grammar", "json_schema"), ()),
    **dict.fromkeys(("response_schema", "guided_decoding", "stop_regex", "samplers"), ()),
    **dict.fromkeys(("custom_logit_processor", "logits_processor", "custom_params"), ()),
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "n_predict", "num_predict"), ()),
    **dict.fromkeys(("negative_prompt", "guidance_scale", "force_words_ids", "suffix_ids"), ()),
    **dict.fromkeys(("typical_p", "top_a", "tfs_z", "repeat_penalty", "top_p_decay"), (1, 1.0)),
    **dict.fromkeys(("encoder_repetition_penalty", "num_beams", "beam_width"), (1, 1.0)),
    **dict.fromkeys(("mirostat", "no_repeat_ngram_size", "penalty_alpha"), (0, 0.0)),
    **dict.fromkeys(("xtc_probability", "dry_multiplier", "dynatemp_range"), (0, 0.0)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "smoothing_factor"), (0, 0.0)),
    **dict.fromkeys(("top_n_sigma",), (0, 0.0, -1, -1.0)),
    **dict.fromkeys(("watermark", "return_hidden_states", "no_stop_trim"), (False,)),
    "do_sample": (True,),
}
_EMPTY: tuple[Any, ...] = ([], {}, "")

# In earlier answers that clients send back, ours or of other servers.
COPIED = frozenset(
    {"id", "index", "status", "object", "annotations", "logprobs", "parsed", "parsed_arguments"}
    | {"reasoning_details", "provider_specific_fields", "extra_content", "cache_control"}
    | {"signature", "prompt_cache_breakpoint"}
)


def accepted(
    body: Any,
    known: Collection[str],
    neutral: Neutral,
    harmless: Collection[str],
    where: str | None,
) -> Any:
    """A JSON object without what asks for nothing. Other values are returned as they are.

    Raises PydanticCustomError for a neutral field that is not "off". `where` precedes the names of
    unknown fields in notices; without it, or where none are collected, the schema refuses them.
    """
    if not isinstance(body, dict):
        return body
    kept = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            kept[name] = value
        elif name in neutral:
            if not any(_is_same(value, off) for off in neutral[name]):
                context = {"field": name, "problem": _problem(neutral[name])}
                raise PydanticCustomError(UNSUPPORTED_FIELD, "{problem}", context)
        elif name not in harmless:
            if where == "" and name in ELSEWHERE:
                _check_elsewhere(name, value)
                continue
            if where is None or not notices.are_collected():
                kept[name] = value
                continue
            shown = str(name)[: notices.MOST_NAME_CHARACTERS]
            notices.ignore(where + shown, "is not a field of this request, and was ignored")
    return kept


def _check_elsewhere(name: str, value: Any) -> None:
    """Raises PydanticCustomError for a field of another server that asks for something."""
    if not any(_is_same(value, off) for off in (*ELSEWHERE[name], *_EMPTY)):
        context = {"field": name, "problem": _problem(ELSEWHERE[name])}
        raise PydanticCustomError(UNSUPPORTED_FIELD, "{problem}", context)


def _is_same(value: Any, neutral: Any) -> bool:
    # JSON's true is not 1, unlike Python's.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _problem(neutral: tuple[Any, ...]) -> str:
    if not neutral:
        return "is not supported by this server; leave it out"
    return f"is not supported by this server; leave it out or send {json.dumps(neutral[0])}"


def refusal(problem: Mapping[str, Any], path: str = "", num_outer: int = 0) -> RequestError:
    """The error for a problem of a validation, which never repeats the input: it may be a prompt.

    `path` precedes the place of the problem, without the first `num_outer` parts.
    """
    place = problem["loc"][num_outer:]
    if problem["type"] == UNSUPPORTED_FIELD:
        place = (*place, problem["ctx"]["field"])
    field = _field_name(path, place)
    match problem["type"]:
        case "extra_forbidden":
            return unsupported(field, "is not a field of this request")
        case "json_invalid":
            return RequestError(ErrorKind.INVALID, "the body is not valid JSON")
        case "missing":
            return invalid(field, "is missing")
        case kind:
            refuse = unsupported if kind == UNSUPPORTED_FIELD else invalid
            return refuse(field, str(problem["msg"]))


def _field_name(path: str, place: Sequence[str | int]) -> str:
    """The field as the caller would write it: messages[0].content."""
    name = path
    for part in place:
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    return name.removeprefix(".") or "body"
