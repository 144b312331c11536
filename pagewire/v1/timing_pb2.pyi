from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class StepTimings(_message.Message):
    __slots__ = ("queue_us", "prepare_us", "forward_us", "sample_us", "copy_us", "idle_us")
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    PREPARE_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_US_FIELD_NUMBER: _ClassVar[int]
    COPY_US_FIELD_NUMBER: _ClassVar[int]
    IDLE_US_FIELD_NUMBER: _ClassVar[int]
    queue_us: int
    prepare_us: int
    forward_us: int
    sample_us: int
    copy_us: int
    idle_us: int
    def __init__(self, queue_us: _Optional[int] = ..., prepare_us: _Optional[int] = ..., forward_us: _Optional[int] = ..., sample_us: _Optional[int] = ..., copy_us: _Optional[int] = ..., idle_us: _Optional[int] = ...) -> None: ...

class DecodeTime(_message.Message):
    __slots__ = ("num_steps", "busy_us", "idle_us")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    BUSY_US_FIELD_NUMBER: _ClassVar[int]
    IDLE_US_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    busy_us: int
    idle_us: int
    def __init__(self, num_steps: _Optional[int] = ..., busy_us: _Optional[int] = ..., idle_us: _Optional[int] = ...) -> None: ...
