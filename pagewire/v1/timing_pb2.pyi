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

class RehearsedStep(_message.Message):
    __slots__ = ("num_tokens", "seconds")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    seconds: float
    def __init__(self, num_tokens: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class DecodeTime(_message.Message):
    __slots__ = ("num_steps", "busy_us", "idle_us")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    BUSY_US_FIELD_NUMBER: _ClassVar[int]
    IDLE_US_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    busy_us: int
    idle_us: int
    def __init__(self, num_steps: _Optional[int] = ..., busy_us: _Optional[int] = ..., idle_us: _Optional[int] = ...) -> None: ...

class GemmTiming(_message.Message):
    __slots__ = ("num_rows", "num_outputs", "num_inputs", "adds", "torch_us", "us")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    NUM_INPUTS_FIELD_NUMBER: _ClassVar[int]
    ADDS_FIELD_NUMBER: _ClassVar[int]
    TORCH_US_FIELD_NUMBER: _ClassVar[int]
    US_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    num_outputs: int
    num_inputs: int
    adds: bool
    torch_us: float
    us: float
    def __init__(self, num_rows: _Optional[int] = ..., num_outputs: _Optional[int] = ..., num_inputs: _Optional[int] = ..., adds: bool = ..., torch_us: _Optional[float] = ..., us: _Optional[float] = ...) -> None: ...

class AttentionTiming(_message.Message):
    __slots__ = ("kind", "shape", "backend", "us")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    US_FIELD_NUMBER: _ClassVar[int]
    kind: str
    shape: str
    backend: str
    us: float
    def __init__(self, kind: _Optional[str] = ..., shape: _Optional[str] = ..., backend: _Optional[str] = ..., us: _Optional[float] = ...) -> None: ...
