from pagewire.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SchedulerServiceLoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "replaces")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    replaces: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., replaces: bool = ...) -> None: ...

class SchedulerServiceLoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _types_pb2.Adapter
    def __init__(self, adapter: _Optional[_Union[_types_pb2.Adapter, _Mapping]] = ...) -> None: ...

class SchedulerServiceUnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class SchedulerServiceUnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("submit", "abort", "hello", "end_session", "sequence", "checksum")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    END_SESSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    abort: AbortHandle
    hello: SessionHello
    end_session: EndSession
    sequence: int
    checksum: int
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[AbortHandle, _Mapping]] = ..., hello: _Optional[_Union[SessionHello, _Mapping]] = ..., end_session: _Optional[_Union[EndSession, _Mapping]] = ..., sequence: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("gateway",)
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    gateway: int
    def __init__(self, gateway: _Optional[int] = ...) -> None: ...

class SessionGreeting(_message.Message):
    __slots__ = ("instance",)
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    instance: int
    def __init__(self, instance: _Optional[int] = ...) -> None: ...

class EndSession(_message.Message):
    __slots__ = ("session_id", "cache_salt")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    cache_salt: str
    def __init__(self, session_id: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "request_id", "prompt_token_ids", "sampling", "tenant", "priority", "timeout_s", "cache_salt", "skip_prefix_cache", "fork_group", "resumed_by_client", "pooling", "num_prompt_tokens", "num_deaths", "trace", "adapter", "session", "pictures")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SKIP_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    FORK_GROUP_FIELD_NUMBER: _ClassVar[int]
    RESUMED_BY_CLIENT_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DEATHS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PICTURES_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    prompt_token_ids: bytes
    sampling: _types_pb2.SamplingParams
    tenant: str
    priority: int
    timeout_s: float
    cache_salt: str
    skip_prefix_cache: bool
    fork_group: str
    resumed_by_client: bool
    pooling: _types_pb2.Pooling
    num_prompt_tokens: int
    num_deaths: int
    trace: _types_pb2.TraceContext
    adapter: _types_pb2.Adapter
    session: _types_pb2.SessionHint
    pictures: _containers.RepeatedCompositeFieldContainer[_types_pb2.Picture]
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., timeout_s: _Optional[float] = ..., cache_salt: _Optional[str] = ..., skip_prefix_cache: bool = ..., fork_group: _Optional[str] = ..., resumed_by_client: bool = ..., pooling: _Optional[_Union[_types_pb2.Pooling, str]] = ..., num_prompt_tokens: _Optional[int] = ..., num_deaths: _Optional[int] = ..., trace: _Optional[_Union[_types_pb2.TraceContext, _Mapping]] = ..., adapter: _Optional[_Union[_types_pb2.Adapter, _Mapping]] = ..., session: _Optional[_Union[_types_pb2.SessionHint, _Mapping]] = ..., pictures: _Optional[_Iterable[_Union[_types_pb2.Picture, _Mapping]]] = ...) -> None: ...

class AbortHandle(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("handles", "token_ids", "finished", "admitted", "logprobs", "prompt_outputs", "draining", "greeting", "adapters_changed", "sequence", "checksum")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    GREETING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_CHANGED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    token_ids: bytes
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    admitted: _containers.RepeatedCompositeFieldContainer[Admitted]
    logprobs: _types_pb2.LogprobColumns
    prompt_outputs: _containers.RepeatedCompositeFieldContainer[_types_pb2.PromptOutput]
    draining: bool
    greeting: SessionGreeting
    adapters_changed: bool
    sequence: int
    checksum: int
    def __init__(self, handles: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., admitted: _Optional[_Iterable[_Union[Admitted, _Mapping]]] = ..., logprobs: _Optional[_Union[_types_pb2.LogprobColumns, _Mapping]] = ..., prompt_outputs: _Optional[_Iterable[_Union[_types_pb2.PromptOutput, _Mapping]]] = ..., draining: bool = ..., greeting: _Optional[_Union[SessionGreeting, _Mapping]] = ..., adapters_changed: bool = ..., sequence: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("handle", "cached_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    cached_tokens: int
    def __init__(self, handle: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("handle", "reason", "stop_token_id", "usage", "status_code", "message", "retry_after_s")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STATUS_CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: _types_pb2.FinishReason
    stop_token_id: int
    usage: _types_pb2.Usage
    status_code: int
    message: str
    retry_after_s: float
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., status_code: _Optional[int] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class SchedulerServiceGenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "tenant", "priority", "cache_salt", "skip_prefix_cache", "fork_group", "pooling", "num_prompt_tokens", "num_deaths", "adapter", "session", "pictures")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SKIP_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    FORK_GROUP_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DEATHS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PICTURES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _types_pb2.SamplingParams
    tenant: str
    priority: int
    cache_salt: str
    skip_prefix_cache: bool
    fork_group: str
    pooling: _types_pb2.Pooling
    num_prompt_tokens: int
    num_deaths: int
    adapter: _types_pb2.Adapter
    session: _types_pb2.SessionHint
    pictures: _containers.RepeatedCompositeFieldContainer[_types_pb2.Picture]
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., skip_prefix_cache: bool = ..., fork_group: _Optional[str] = ..., pooling: _Optional[_Union[_types_pb2.Pooling, str]] = ..., num_prompt_tokens: _Optional[int] = ..., num_deaths: _Optional[int] = ..., adapter: _Optional[_Union[_types_pb2.Adapter, _Mapping]] = ..., session: _Optional[_Union[_types_pb2.SessionHint, _Mapping]] = ..., pictures: _Optional[_Iterable[_Union[_types_pb2.Picture, _Mapping]]] = ...) -> None: ...

class SchedulerServiceGenerateResponse(_message.Message):
    __slots__ = ("request_id", "token_ids", "finish_reason", "stop_token_id", "usage", "logprobs", "prompt_logprobs", "hidden")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _types_pb2.FinishReason
    stop_token_id: int
    usage: _types_pb2.Usage
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    hidden: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., hidden: _Optional[_Iterable[float]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborted: _Optional[_Iterable[str]] = ...) -> None: ...

class SetPriorityRequest(_message.Message):
    __slots__ = ("request_id", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class SetPriorityResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("most_sessions",)
    MOST_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    most_sessions: int
    def __init__(self, most_sessions: _Optional[int] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("ready", "reason", "model", "num_running", "num_waiting", "num_waiting_tokens", "num_blocks", "num_free_blocks", "block_size", "num_steps", "prefix_query_tokens", "prefix_hit_tokens", "num_preemptions", "num_accepted", "num_finished", "num_output_tokens", "num_prefill_tokens", "epoch", "worker_address", "max_num_seqs", "max_num_batched_tokens", "uptime_s", "num_evictions", "num_cached_blocks", "num_forks", "preemption", "num_host_blocks", "num_free_host_blocks", "num_swapped_out_blocks", "num_swapped_in_blocks", "seconds_of_backlog", "num_overloaded", "num_expired", "policy", "groups", "attention_backend", "all_reduce", "target_itl_ms", "num_capped_steps", "device", "session_version", "stands_by", "kv_cache_dtype", "speculation", "num_drafts", "num_drafted_tokens", "num_accepted_tokens", "steps_by_size", "num_step_tokens", "adapters", "cache_policy", "num_awaited_evictions", "num_tier_blocks", "num_tier_cached_blocks", "sessions", "num_preempted", "returned_query_tokens", "returned_hit_tokens", "num_swapped_dropped_blocks", "num_disk_blocks", "num_disk_cached_blocks")
    READY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORKS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_OUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_IN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_OF_BACKLOG_FIELD_NUMBER: _ClassVar[int]
    NUM_OVERLOADED_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    ALL_REDUCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_ITL_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_CAPPED_STEPS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SESSION_VERSION_FIELD_NUMBER: _ClassVar[int]
    STANDS_BY_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_BY_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    CACHE_POLICY_FIELD_NUMBER: _ClassVar[int]
    NUM_AWAITED_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TIER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TIER_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    RETURNED_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURNED_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    reason: str
    model: _types_pb2.ModelInfo
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_blocks: int
    num_free_blocks: int
    block_size: int
    num_steps: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_preemptions: int
    num_accepted: int
    num_finished: int
    num_output_tokens: int
    num_prefill_tokens: int
    epoch: int
    worker_address: str
    max_num_seqs: int
    max_num_batched_tokens: int
    uptime_s: float
    num_evictions: int
    num_cached_blocks: int
    num_forks: int
    preemption: str
    num_host_blocks: int
    num_free_host_blocks: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    seconds_of_backlog: float
    num_overloaded: int
    num_expired: int
    policy: str
    groups: _containers.RepeatedCompositeFieldContainer[WorkerGroupStatus]
    attention_backend: str
    all_reduce: str
    target_itl_ms: float
    num_capped_steps: int
    device: str
    session_version: int
    stands_by: bool
    kv_cache_dtype: str
    speculation: str
    num_drafts: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    steps_by_size: _containers.RepeatedScalarFieldContainer[int]
    num_step_tokens: int
    adapters: _containers.RepeatedCompositeFieldContainer[_types_pb2.Adapter]
    cache_policy: str
    num_awaited_evictions: int
    num_tier_blocks: int
    num_tier_cached_blocks: int
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    num_preempted: int
    returned_query_tokens: int
    returned_hit_tokens: int
    num_swapped_dropped_blocks: int
    num_disk_blocks: int
    num_disk_cached_blocks: int
    def __init__(self, ready: bool = ..., reason: _Optional[str] = ..., model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., num_steps: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_accepted: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., epoch: _Optional[int] = ..., worker_address: _Optional[str] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., uptime_s: _Optional[float] = ..., num_evictions: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_forks: _Optional[int] = ..., preemption: _Optional[str] = ..., num_host_blocks: _Optional[int] = ..., num_free_host_blocks: _Optional[int] = ..., num_swapped_out_blocks: _Optional[int] = ..., num_swapped_in_blocks: _Optional[int] = ..., seconds_of_backlog: _Optional[float] = ..., num_overloaded: _Optional[int] = ..., num_expired: _Optional[int] = ..., policy: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[WorkerGroupStatus, _Mapping]]] = ..., attention_backend: _Optional[str] = ..., all_reduce: _Optional[str] = ..., target_itl_ms: _Optional[float] = ..., num_capped_steps: _Optional[int] = ..., device: _Optional[str] = ..., session_version: _Optional[int] = ..., stands_by: bool = ..., kv_cache_dtype: _Optional[str] = ..., speculation: _Optional[str] = ..., num_drafts: _Optional[int] = ..., num_drafted_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., steps_by_size: _Optional[_Iterable[int]] = ..., num_step_tokens: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[_types_pb2.Adapter, _Mapping]]] = ..., cache_policy: _Optional[str] = ..., num_awaited_evictions: _Optional[int] = ..., num_tier_blocks: _Optional[int] = ..., num_tier_cached_blocks: _Optional[int] = ..., sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., num_preempted: _Optional[int] = ..., returned_query_tokens: _Optional[int] = ..., returned_hit_tokens: _Optional[int] = ..., num_swapped_dropped_blocks: _Optional[int] = ..., num_disk_blocks: _Optional[int] = ..., num_disk_cached_blocks: _Optional[int] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("worker_address", "session_id", "tenant", "state", "num_turns", "num_cached_tokens", "idle_s", "num_prompt_tokens", "num_found_tokens")
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_address: str
    session_id: str
    tenant: str
    state: str
    num_turns: int
    num_cached_tokens: int
    idle_s: float
    num_prompt_tokens: int
    num_found_tokens: int
    def __init__(self, worker_address: _Optional[str] = ..., session_id: _Optional[str] = ..., tenant: _Optional[str] = ..., state: _Optional[str] = ..., num_turns: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., idle_s: _Optional[float] = ..., num_prompt_tokens: _Optional[int] = ..., num_found_tokens: _Optional[int] = ...) -> None: ...

class WorkerGroupStatus(_message.Message):
    __slots__ = ("address", "ready", "reason", "epoch", "num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_steps", "num_output_tokens", "num_losses", "why_lost", "num_migrated_out", "num_migrated_in", "seconds_of_backlog", "attention_backend", "all_reduce", "device", "source", "draining", "kv_cache_dtype")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOSSES_FIELD_NUMBER: _ClassVar[int]
    WHY_LOST_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATED_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATED_IN_FIELD_NUMBER: _ClassVar[int]
    SECONDS_OF_BACKLOG_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    ALL_REDUCE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    address: str
    ready: bool
    reason: str
    epoch: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_steps: int
    num_output_tokens: int
    num_losses: int
    why_lost: str
    num_migrated_out: int
    num_migrated_in: int
    seconds_of_backlog: float
    attention_backend: str
    all_reduce: str
    device: str
    source: str
    draining: str
    kv_cache_dtype: str
    def __init__(self, address: _Optional[str] = ..., ready: bool = ..., reason: _Optional[str] = ..., epoch: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_losses: _Optional[int] = ..., why_lost: _Optional[str] = ..., num_migrated_out: _Optional[int] = ..., num_migrated_in: _Optional[int] = ..., seconds_of_backlog: _Optional[float] = ..., attention_backend: _Optional[str] = ..., all_reduce: _Optional[str] = ..., device: _Optional[str] = ..., source: _Optional[str] = ..., draining: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ...) -> None: ...
