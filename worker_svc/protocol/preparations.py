"""Converts frames about what is prepared ahead of its sequences: grammars and pictures."""

from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from pagewire.v1 import worker_pb2
from worker_svc.protocol import columns
from worker_svc.protocol.pictures import PictureOrder, to_picture_order
from worker_svc.protocol.step import BadStep, Limits

_TAG = bytes([worker_pb2.AttachRequest.PREPARE_FIELD_NUMBER << 3 | 2])  # length-delimited


@dataclass(frozen=True, slots=True)
class GrammarOrder:
    """A grammar to prepare, up to the place that an output has reached."""

    preparation_id: int
    grammar: str
    output_token_ids: NDArray[np.integer]
    refusal: str = ""  # why it is not prepared; empty: it is to be


@dataclass(frozen=True, slots=True)
class PreparationOrders:
    """A frame of orders, and the ids of earlier ones that are not needed any more."""

    grammars: tuple[GrammarOrder, ...]
    pictures: tuple[PictureOrder, ...]
    dropped_ids: tuple[int, ...]


def decode_orders(frame: bytes, limits: Limits) -> PreparationOrders | None:
    """Decodes a frame with what to prepare; None for any other. Raises BadStep."""
    if not frame.startswith(_TAG):  # a step, parsed only once
        return None
    try:
        message = worker_pb2.AttachRequest.FromString(frame)
    except DecodeError:
        return None  # refused when it is executed
    if message.WhichOneof("frame") != "prepare":
        return None
    prepare = message.prepare
    grammars = [_order(preparation, limits) for preparation in prepare.preparations]
    pictures = map(to_picture_order, prepare.pictures)
    return PreparationOrders(tuple(grammars), tuple(pictures), tuple(prepare.dropped_ids))


def _order(message: worker_pb2.GrammarPreparation, limits: Limits) -> GrammarOrder:
    name = "prepare.preparations.output_token_ids"
    token_ids = columns.column(message.output_token_ids, name)
    if not message.preparation_id:
        raise BadStep("prepare.preparations.preparation_id", "must not be 0")
    refusal = "" if message.grammar else "it is empty"
    if ((token_ids < 0) | (token_ids >= limits.vocab_size)).any():
        refusal = f"the output so far has tokens that are not below {limits.vocab_size}"
    return GrammarOrder(message.preparation_id, message.grammar, token_ids, refusal)


def encode_prepared(preparation_id: int, problem: str) -> bytes:
    """Encodes the answer to one preparation; the problem is empty if it is ready."""
    answer = worker_pb2.GrammarPrepared(preparation_id=preparation_id, problem=problem)
    return worker_pb2.AttachResponse(grammar_prepared=answer).SerializeToString()
