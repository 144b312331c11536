"""Converts frames about adapters that are prepared ahead of their sequences."""

from google.protobuf.message import DecodeError

from pagewire.v1 import types_pb2, worker_pb2
from wire.adapters import AdapterSource
from worker_svc.adapters.store import AdapterOrder, AdapterOrders
from worker_svc.protocol.step import BadStep

# Length-delimited; a step, parsed only once, begins with another.
_TAG = bytes([worker_pb2.AttachRequest.PREPARE_ADAPTERS_FIELD_NUMBER << 3 | 2])


def decode_adapter_orders(frame: bytes) -> AdapterOrders | None:
    """Decodes a frame with adapters to prepare; None for any other. Raises BadStep."""
    if not frame.startswith(_TAG):
        return None
    try:
        message = worker_pb2.AttachRequest.FromString(frame)
    except DecodeError:
        return None  # refused when it is executed
    if message.WhichOneof("frame") != "prepare_adapters":
        return None
    prepare = message.prepare_adapters
    orders = [
        AdapterOrder(one.preparation_id, AdapterSource.from_message(one.adapter))
        for one in prepare.preparations
    ]
    for order in orders:
        if not order.preparation_id:
            raise BadStep("prepare_adapters.preparations.preparation_id", "must not be 0")
        if not order.source.adapter_id:
            raise BadStep("prepare_adapters.preparations.adapter", "has no adapter_id")
    return AdapterOrders(tuple(orders), tuple(prepare.dropped_ids))


def encode_adapter_orders(orders: AdapterOrders) -> bytes:
    """Encodes orders, for another rank."""
    prepare = worker_pb2.PrepareAdapters(dropped_ids=orders.dropped_ids)
    for order in orders.wanted:
        prepare.preparations.add(
            preparation_id=order.preparation_id, adapter=types_pb2.Adapter(**order.source.fields())
        )
    return worker_pb2.AttachRequest(prepare_adapters=prepare).SerializeToString()


def encode_adapter_prepared(preparation_id: int, problem: str) -> bytes:
    """Encodes the answer to one preparation; the problem is empty if it is ready."""
    answer = worker_pb2.AdapterPrepared(preparation_id=preparation_id, problem=problem)
    return worker_pb2.AttachResponse(adapter_prepared=answer).SerializeToString()
