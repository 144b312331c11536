from pagewire.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournalRecord(_message.Message):
    __slots__ = ("header", "event", "snapshot")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    header: JournalHeader
    event: JournalEvent
    snapshot: JournalValues
    def __init__(self, header: _Optional[_Union[JournalHeader, _Mapping]] = ..., event: _Optional[_Union[JournalEvent, _Mapping]] = ..., snapshot: _Optional[_Union[JournalValues, _Mapping]] = ...) -> None: ...

class JournalHeader(_message.Message):
    __slots__ = ("format_version", "segment", "first_event", "started_s", "versions", "core_sha256", "config", "worker", "worker_address", "prompts_replaced")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    FIRST_EVENT_FIELD_NUMBER: _ClassVar[int]
    STARTED_S_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    CORE_SHA256_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_REPLACED_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    segment: int
    first_event: int
    started_s: float
    versions: _containers.RepeatedScalarFieldContainer[str]
    core_sha256: str
    config: JournalValues
    worker: _worker_pb2.WorkerDescription
    worker_address: str
    prompts_replaced: bool
    def __init__(self, format_version: _Optional[int] = ..., segment: _Optional[int] = ..., first_event: _Optional[int] = ..., started_s: _Optional[float] = ..., versions: _Optional[_Iterable[str]] = ..., core_sha256: _Optional[str] = ..., config: _Optional[_Union[JournalValues, _Mapping]] = ..., worker: _Optional[_Union[_worker_pb2.WorkerDescription, _Mapping]] = ..., worker_address: _Optional[str] = ..., prompts_replaced: bool = ...) -> None: ...

class JournalValues(_message.Message):
    __slots__ = ("json", "columns")
    JSON_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    json: str
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, json: _Optional[str] = ..., columns: _Optional[_Iterable[bytes]] = ...) -> None: ...

class JournalEvent(_message.Message):
    __slots__ = ("number", "call", "arguments", "outcome", "raised", "step", "plan")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    RAISED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    number: int
    call: str
    arguments: JournalValues
    outcome: JournalValues
    raised: str
    step: _worker_pb2.SchedulerOutput
    plan: JournalPlanFacts
    def __init__(self, number: _Optional[int] = ..., call: _Optional[str] = ..., arguments: _Optional[_Union[JournalValues, _Mapping]] = ..., outcome: _Optional[_Union[JournalValues, _Mapping]] = ..., raised: _Optional[str] = ..., step: _Optional[_Union[_worker_pb2.SchedulerOutput, _Mapping]] = ..., plan: _Optional[_Union[JournalPlanFacts, _Mapping]] = ...) -> None: ...

class JournalPlanFacts(_message.Message):
    __slots__ = ("sampled_slots", "preempted", "num_free_blocks")
    SAMPLED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    sampled_slots: bytes
    preempted: _containers.RepeatedScalarFieldContainer[str]
    num_free_blocks: int
    def __init__(self, sampled_slots: _Optional[bytes] = ..., preempted: _Optional[_Iterable[str]] = ..., num_free_blocks: _Optional[int] = ...) -> None: ...
