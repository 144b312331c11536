from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProfileStepsRequest(_message.Message):
    __slots__ = ("steps", "kernels", "timeout_s")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    steps: int
    kernels: bool
    timeout_s: float
    def __init__(self, steps: _Optional[int] = ..., kernels: bool = ..., timeout_s: _Optional[float] = ...) -> None: ...

class ProfileStepsResponse(_message.Message):
    __slots__ = ("clock_ns", "intervals", "num_left_out", "num_steps", "clock_error_ns")
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    INTERVALS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_ERROR_NS_FIELD_NUMBER: _ClassVar[int]
    clock_ns: int
    intervals: _containers.RepeatedCompositeFieldContainer[ProfileInterval]
    num_left_out: int
    num_steps: int
    clock_error_ns: int
    def __init__(self, clock_ns: _Optional[int] = ..., intervals: _Optional[_Iterable[_Union[ProfileInterval, _Mapping]]] = ..., num_left_out: _Optional[int] = ..., num_steps: _Optional[int] = ..., clock_error_ns: _Optional[int] = ...) -> None: ...

class ProfileInterval(_message.Message):
    __slots__ = ("service", "track", "name", "begin_ns", "duration_ns", "step_id", "num_tokens", "num_decode_rows")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    TRACK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    service: str
    track: str
    name: str
    begin_ns: int
    duration_ns: int
    step_id: int
    num_tokens: int
    num_decode_rows: int
    def __init__(self, service: _Optional[str] = ..., track: _Optional[str] = ..., name: _Optional[str] = ..., begin_ns: _Optional[int] = ..., duration_ns: _Optional[int] = ..., step_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_decode_rows: _Optional[int] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "total")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestSummary]
    total: int
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestSummary, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class RequestSummary(_message.Message):
    __slots__ = ("request_id", "state", "num_prompt_tokens", "num_output_tokens", "num_computed_tokens", "num_blocks", "slot", "num_preemptions", "age_s", "summary", "worker_address")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_blocks: int
    slot: int
    num_preemptions: int
    age_s: float
    summary: str
    worker_address: str
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., slot: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., age_s: _Optional[float] = ..., summary: _Optional[str] = ..., worker_address: _Optional[str] = ...) -> None: ...

class DescribeRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class DescribeRequestResponse(_message.Message):
    __slots__ = ("request", "block_ids", "sampling", "story", "time_spent")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STORY_FIELD_NUMBER: _ClassVar[int]
    TIME_SPENT_FIELD_NUMBER: _ClassVar[int]
    request: RequestSummary
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: str
    story: _containers.RepeatedScalarFieldContainer[str]
    time_spent: TimeSpent
    def __init__(self, request: _Optional[_Union[RequestSummary, _Mapping]] = ..., block_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[str] = ..., story: _Optional[_Iterable[str]] = ..., time_spent: _Optional[_Union[TimeSpent, _Mapping]] = ...) -> None: ...

class TimeSpent(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "decode_s", "preempted_s", "worker_away_s", "grammar_s", "kv_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_S_FIELD_NUMBER: _ClassVar[int]
    WORKER_AWAY_S_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_S_FIELD_NUMBER: _ClassVar[int]
    KV_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    decode_s: float
    preempted_s: float
    worker_away_s: float
    grammar_s: float
    kv_s: float
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., preempted_s: _Optional[float] = ..., worker_away_s: _Optional[float] = ..., grammar_s: _Optional[float] = ..., kv_s: _Optional[float] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request_id", "state", "message", "wall_s", "time_spent", "waits", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_preemptions", "story", "summary", "first_token")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    TIME_SPENT_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    STORY_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: str
    message: str
    wall_s: float
    time_spent: TimeSpent
    waits: _containers.RepeatedCompositeFieldContainer[WaitingTime]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    story: _containers.RepeatedScalarFieldContainer[str]
    summary: str
    first_token: _containers.RepeatedCompositeFieldContainer[PathStage]
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[str] = ..., message: _Optional[str] = ..., wall_s: _Optional[float] = ..., time_spent: _Optional[_Union[TimeSpent, _Mapping]] = ..., waits: _Optional[_Iterable[_Union[WaitingTime, _Mapping]]] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., story: _Optional[_Iterable[str]] = ..., summary: _Optional[str] = ..., first_token: _Optional[_Iterable[_Union[PathStage, _Mapping]]] = ...) -> None: ...

class PathStage(_message.Message):
    __slots__ = ("service", "name", "seconds")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    service: str
    name: str
    seconds: float
    def __init__(self, service: _Optional[str] = ..., name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class WaitingTime(_message.Message):
    __slots__ = ("reason", "seconds")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    seconds: float
    def __init__(self, reason: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class DumpBlockPoolRequest(_message.Message):
    __slots__ = ("limit", "worker_address")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    limit: int
    worker_address: str
    def __init__(self, limit: _Optional[int] = ..., worker_address: _Optional[str] = ...) -> None: ...

class DumpBlockPoolResponse(_message.Message):
    __slots__ = ("num_blocks", "num_free", "num_cached", "block_size", "blocks", "free_queue", "summary", "worker_address")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_QUEUE_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_free: int
    num_cached: int
    block_size: int
    blocks: _containers.RepeatedCompositeFieldContainer[BlockSummary]
    free_queue: _containers.RepeatedScalarFieldContainer[int]
    summary: str
    worker_address: str
    def __init__(self, num_blocks: _Optional[int] = ..., num_free: _Optional[int] = ..., num_cached: _Optional[int] = ..., block_size: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[BlockSummary, _Mapping]]] = ..., free_queue: _Optional[_Iterable[int]] = ..., summary: _Optional[str] = ..., worker_address: _Optional[str] = ...) -> None: ...

class BlockSummary(_message.Message):
    __slots__ = ("block_id", "ref_count", "hash", "request_ids")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    REF_COUNT_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    ref_count: int
    hash: str
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, block_id: _Optional[int] = ..., ref_count: _Optional[int] = ..., hash: _Optional[str] = ..., request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ListStepsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListStepsResponse(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepSummary]
    def __init__(self, steps: _Optional[_Iterable[_Union[StepSummary, _Mapping]]] = ...) -> None: ...

class StepSummary(_message.Message):
    __slots__ = ("step_id", "num_prefill_rows", "num_decode_rows", "num_tokens", "rows", "preempted", "num_free_blocks", "duration_us", "summary", "worker_address", "busy_us", "idle_us")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DURATION_US_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BUSY_US_FIELD_NUMBER: _ClassVar[int]
    IDLE_US_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    num_prefill_rows: int
    num_decode_rows: int
    num_tokens: int
    rows: _containers.RepeatedCompositeFieldContainer[StepRow]
    preempted: _containers.RepeatedScalarFieldContainer[str]
    num_free_blocks: int
    duration_us: int
    summary: str
    worker_address: str
    busy_us: int
    idle_us: int
    def __init__(self, step_id: _Optional[int] = ..., num_prefill_rows: _Optional[int] = ..., num_decode_rows: _Optional[int] = ..., num_tokens: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[StepRow, _Mapping]]] = ..., preempted: _Optional[_Iterable[str]] = ..., num_free_blocks: _Optional[int] = ..., duration_us: _Optional[int] = ..., summary: _Optional[str] = ..., worker_address: _Optional[str] = ..., busy_us: _Optional[int] = ..., idle_us: _Optional[int] = ...) -> None: ...

class StepRow(_message.Message):
    __slots__ = ("request_id", "slot", "num_computed_tokens", "num_scheduled_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    slot: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., slot: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_scheduled_tokens: _Optional[int] = ...) -> None: ...
