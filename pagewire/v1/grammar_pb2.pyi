from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrepareGrammars(_message.Message):
    __slots__ = ("preparations", "dropped_ids")
    PREPARATIONS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_IDS_FIELD_NUMBER: _ClassVar[int]
    preparations: _containers.RepeatedCompositeFieldContainer[GrammarPreparation]
    dropped_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, preparations: _Optional[_Iterable[_Union[GrammarPreparation, _Mapping]]] = ..., dropped_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GrammarPreparation(_message.Message):
    __slots__ = ("preparation_id", "grammar", "output_token_ids")
    PREPARATION_ID_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    preparation_id: int
    grammar: str
    output_token_ids: bytes
    def __init__(self, preparation_id: _Optional[int] = ..., grammar: _Optional[str] = ..., output_token_ids: _Optional[bytes] = ...) -> None: ...

class GrammarPrepared(_message.Message):
    __slots__ = ("preparation_id", "problem")
    PREPARATION_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    preparation_id: int
    problem: str
    def __init__(self, preparation_id: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...
