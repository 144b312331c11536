"""Pictures of requests: read, refused by name, and sent to the worker with their preparations."""

from typing import Any

import numpy as np
import pytest

from pagewire.v1 import scheduler_pb2, types_pb2, worker_pb2
from scheduler_svc.convert import Origin, to_preparations, to_request, to_step
from scheduler_svc.core import GRAMMAR, Preparations, RequirementKind
from scheduler_svc.core.queue.requirement_waits import Preparation
from scheduler_svc.core_config import check_successor
from scheduler_svc.journal.mask import Mask
from scheduler_svc.pictures import MAX_PICTURES, BadPicture
from scheduler_svc.worker.served import WrongWorker
from tests.scheduler_svc.core.builders import make_scheduler, plan_step

PIXELS = types_pb2.PicturePixels(values=b"abc", num_rows=1, means=[0.0] * 3, deviations=[1.0] * 3)
ONE, TWO = bytes(range(16)), bytes(range(16, 32))


def shown(position: int, content_id: bytes, **fields: Any) -> types_pb2.Picture:
    return types_pb2.Picture(
        **{"position": position, "num_tokens": 2, "content_id": content_id, "pixels": PIXELS}
        | fields
    )


def read(*pictures: types_pb2.Picture, grammar: str = "") -> Any:
    submit = scheduler_pb2.Submit(
        request_id="a",
        pictures=pictures,
        sampling=types_pb2.SamplingParams(max_tokens=1, grammar=grammar),
    )
    tokens, origin = np.arange(1, 13, dtype=np.int32), Origin("a", 1, 1, None)
    return to_request(submit, tokens, origin, drawn_seed=1, vocab_size=100, arrival_s=0.0)


def test_a_picture_that_stands_in_two_places_is_prepared_and_sent_once() -> None:
    again = shown(8, ONE)
    again.ClearField("pixels")
    request = read(shown(1, ONE), shown(4, TWO), again, grammar="root: /x/")
    kinds = (RequirementKind.GRAMMAR, RequirementKind.ENCODER_OUTPUT)
    scheduler = make_scheduler(prepared_kinds=kinds)
    scheduler.add(request)
    orders = scheduler.take_preparations()
    assert orders is not None
    grammars, *messages = (frame.prepare for frame in to_preparations(orders, kinds))
    assert [one.grammar for one in grammars.preparations] == ["root: /x/"]
    (first,), (second,) = (message.pictures for message in messages)
    assert (first.content_id, first.num_tokens, first.pixels) == (ONE, 2, PIXELS)
    assert second.content_id == TWO
    for wanted in orders.wanted:
        scheduler.prepared(wanted.preparation_id)
    (entering,) = to_step(plan_step(scheduler)).new_sequences
    assert [(placed.position, placed.preparation_id) for placed in entering.pictures] == [
        (1, first.preparation_id),
        (4, second.preparation_id),
        (8, first.preparation_id),
    ]


def test_what_is_dropped_goes_before_any_picture() -> None:
    request = read(shown(1, ONE))
    (requirement,) = request.requirements
    wanted = Preparation(7, requirement, request, np.zeros(0, dtype=np.int32))
    kinds = (RequirementKind.ENCODER_OUTPUT,)
    frames = to_preparations(Preparations((wanted,), (3,)), kinds)
    assert [[*frame.prepare.dropped_ids] for frame in frames] == [[3], []]
    assert to_preparations(Preparations((), ()), kinds) == []


@pytest.mark.parametrize(
    ("pictures", "problem"),
    [
        ([shown(1, b"short")], r"pictures\[0\].content_id has 5 bytes, must have 16"),
        ([shown(1, ONE), shown(4, b"")], r"pictures\[1\].content_id has 0 bytes"),
        ([shown(1, ONE, pixels=None)], r"pictures\[0\].pixels is absent"),
        ([shown(1, ONE), shown(4, ONE, num_tokens=3)], r"pictures\[1\].num_tokens differs"),
        ([shown(1, ONE)] * (MAX_PICTURES + 1), "pictures has 257 entries, at most 256"),
    ],
)
def test_a_bad_picture_is_refused_by_its_field(
    pictures: list[types_pb2.Picture], problem: str
) -> None:
    with pytest.raises(BadPicture, match=problem):
        read(*pictures)


def test_a_worker_that_encodes_none_cannot_follow_one_that_does() -> None:
    before = make_scheduler(
        prepared_kinds=(GRAMMAR.kind, RequirementKind.ENCODER_OUTPUT), block_size=4
    )
    worker = worker_pb2.WorkerDescription(
        block_size=4, max_num_seqs=4, prepares_grammars=True, num_blocks=17
    )
    with pytest.raises(WrongWorker, match="it does not prepare pictures, unlike"):
        check_successor(before.config, worker)
    worker.encodes_pictures = True
    check_successor(before.config, worker)


def test_pixels_are_in_no_recording() -> None:

    masked = Mask(1000, 4, bytes(16)).request(read(shown(1, ONE)))
    assert masked.pictures is None
    assert len(masked.extras) == 1
