from pagewire.v1 import worker_pb2 as _worker_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankOrder(_message.Message):
    __slots__ = ("load", "initialize_cache", "warm_up", "frame", "granted_step", "changes", "forget_rows", "prepare")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    INITIALIZE_CACHE_FIELD_NUMBER: _ClassVar[int]
    WARM_UP_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    GRANTED_STEP_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    FORGET_ROWS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    load: LoadOrder
    initialize_cache: _worker_pb2.InitializeCacheRequest
    warm_up: _worker_pb2.WarmUpRequest
    frame: bytes
    granted_step: GrantedStep
    changes: bytes
    forget_rows: ForgetRows
    prepare: bytes
    def __init__(self, load: _Optional[_Union[LoadOrder, _Mapping]] = ..., initialize_cache: _Optional[_Union[_worker_pb2.InitializeCacheRequest, _Mapping]] = ..., warm_up: _Optional[_Union[_worker_pb2.WarmUpRequest, _Mapping]] = ..., frame: _Optional[bytes] = ..., granted_step: _Optional[_Union[GrantedStep, _Mapping]] = ..., changes: _Optional[bytes] = ..., forget_rows: _Optional[_Union[ForgetRows, _Mapping]] = ..., prepare: _Optional[bytes] = ...) -> None: ...

class LoadOrder(_message.Message):
    __slots__ = ("request", "store_port")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    request: _worker_pb2.LoadModelRequest
    store_port: int
    def __init__(self, request: _Optional[_Union[_worker_pb2.LoadModelRequest, _Mapping]] = ..., store_port: _Optional[int] = ...) -> None: ...

class GrantedStep(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForgetRows(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
