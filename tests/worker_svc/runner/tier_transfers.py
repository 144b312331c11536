"""Transfers of two blocks between a worker's cache and one of its tiers, by the step stream."""

from pagewire.v1 import worker_pb2
from tests.worker_svc.conftest import Attachment
from wire.columns import UINT64, pack

KEYS = [2**64 - 1, 5, 17, 2**63]  # of both blocks, two numbers each


def transfer(attachment: Attachment, kind: str, **fields: object) -> worker_pb2.TransferDone:
    """Sends a fetch or a store, with the keys and number 1 if others are not given; its answer."""
    told: dict[str, object] = {"transfer_id": 1, "keys": pack(KEYS, UINT64)}
    message = {"fetch": worker_pb2.FetchBlocks, "store": worker_pb2.StoreBlocks}[kind]
    attachment.send_raw(worker_pb2.AttachRequest(**{kind: message(**(told | fields))}))
    done: worker_pb2.TransferDone = next(attachment.call).transfer_done
    return done
