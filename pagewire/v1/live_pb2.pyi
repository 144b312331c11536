from pagewire.v1 import scheduler_pb2 as _scheduler_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LivePhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LIVE_PHASE_UNSPECIFIED: _ClassVar[LivePhase]
    LIVE_PHASE_QUEUE: _ClassVar[LivePhase]
    LIVE_PHASE_GRAMMAR: _ClassVar[LivePhase]
    LIVE_PHASE_PREFILL: _ClassVar[LivePhase]
    LIVE_PHASE_DECODE: _ClassVar[LivePhase]
    LIVE_PHASE_PREEMPTED: _ClassVar[LivePhase]
    LIVE_PHASE_WORKER_AWAY: _ClassVar[LivePhase]
    LIVE_PHASE_KV: _ClassVar[LivePhase]
LIVE_PHASE_UNSPECIFIED: LivePhase
LIVE_PHASE_QUEUE: LivePhase
LIVE_PHASE_GRAMMAR: LivePhase
LIVE_PHASE_PREFILL: LivePhase
LIVE_PHASE_DECODE: LivePhase
LIVE_PHASE_PREEMPTED: LivePhase
LIVE_PHASE_WORKER_AWAY: LivePhase
LIVE_PHASE_KV: LivePhase

class WatchRequest(_message.Message):
    __slots__ = ("interval_s", "max_cells", "max_requests", "most_sessions")
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    MAX_CELLS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MOST_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    max_cells: int
    max_requests: int
    most_sessions: int
    def __init__(self, interval_s: _Optional[float] = ..., max_cells: _Optional[int] = ..., max_requests: _Optional[int] = ..., most_sessions: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("status", "groups", "tells_sessions")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TELLS_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    status: _scheduler_pb2.GetStatusResponse
    groups: _containers.RepeatedCompositeFieldContainer[GroupActivity]
    tells_sessions: bool
    def __init__(self, status: _Optional[_Union[_scheduler_pb2.GetStatusResponse, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[GroupActivity, _Mapping]]] = ..., tells_sessions: bool = ...) -> None: ...

class GroupActivity(_message.Message):
    __slots__ = ("address", "blocks", "requests", "steps")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    address: str
    blocks: BlockMap
    requests: LiveRequests
    steps: _containers.RepeatedCompositeFieldContainer[StepBar]
    def __init__(self, address: _Optional[str] = ..., blocks: _Optional[_Union[BlockMap, _Mapping]] = ..., requests: _Optional[_Union[LiveRequests, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[StepBar, _Mapping]]] = ...) -> None: ...

class BlockMap(_message.Message):
    __slots__ = ("num_blocks", "blocks_per_cell", "cells")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_CELL_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    blocks_per_cell: int
    cells: bytes
    def __init__(self, num_blocks: _Optional[int] = ..., blocks_per_cell: _Optional[int] = ..., cells: _Optional[bytes] = ...) -> None: ...

class LiveRequests(_message.Message):
    __slots__ = ("numbers", "phases", "num_tokens", "num_computed_tokens", "num_blocks", "facts", "total")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    numbers: bytes
    phases: bytes
    num_tokens: bytes
    num_computed_tokens: bytes
    num_blocks: bytes
    facts: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    total: int
    def __init__(self, numbers: _Optional[bytes] = ..., phases: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., num_computed_tokens: _Optional[bytes] = ..., num_blocks: _Optional[bytes] = ..., facts: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("number", "request_id", "tenant", "num_prompt_tokens", "num_cached_tokens", "age_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    request_id: str
    tenant: str
    num_prompt_tokens: int
    num_cached_tokens: int
    age_s: float
    def __init__(self, number: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class StepBar(_message.Message):
    __slots__ = ("step_id", "num_steps", "num_prefill_tokens", "num_decode_tokens", "num_rows", "duration_us")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    DURATION_US_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_rows: int
    duration_us: int
    def __init__(self, step_id: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., num_decode_tokens: _Optional[int] = ..., num_rows: _Optional[int] = ..., duration_us: _Optional[int] = ...) -> None: ...
