"""Names of adapters at a scheduler with several workers, and the frames about them."""

from collections.abc import Awaitable, Callable

import grpc
import numpy as np
import pytest

from pagewire.v1 import scheduler_pb2, types_pb2, worker_pb2
from scheduler_svc.adapters import AdapterRefused, AdapterRegistry
from scheduler_svc.convert import Origin, to_preparations, to_request
from scheduler_svc.core import GRAMMAR, RefusalKind, Refused, RequirementKind
from scheduler_svc.core.request.requirement import adapter_requirement
from scheduler_svc.core_config import check_successor, core_config
from scheduler_svc.journal.values import as_read
from scheduler_svc.sampling import BadSampling
from scheduler_svc.worker.link import LinkLost
from scheduler_svc.worker.served import WrongWorker
from tests.scheduler_svc.conftest import service_config
from tests.scheduler_svc.core.builders import make_scheduler
from wire.adapters import AdapterSource

LAW = AdapterSource("law", "/law", "law@1")
OTHER_LAW = AdapterSource("law", "/other", "law@2")
CODE = AdapterSource("code", "/code", "code@1")


def reading(
    found: AdapterSource | Exception,
) -> Callable[[str, str, bool], Awaitable[AdapterSource]]:
    async def load(name: str, path: str, replaces: bool) -> AdapterSource:
        if isinstance(found, Exception):
            raise found
        return found

    return load


async def nothing(name: str) -> None:
    pass


def failing(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


async def test_names_are_those_of_all_workers_and_each_change_is_told() -> None:
    changes: list[list[str]] = []
    registry = AdapterRegistry()
    registry.on_change = lambda: changes.append([one.name for one in registry.sources])
    registry.hear([LAW], "first")
    registry.hear([LAW, CODE], "second")
    registry.hear([OTHER_LAW], "third")  # another one of that name: the first stays
    assert registry.sources == [LAW, CODE]
    await registry.unload("law", [nothing])
    registry.hear([LAW], "first")  # it was away when the adapter was unloaded
    assert registry.sources == [CODE]
    await registry.load("law", "/other", [reading(OTHER_LAW)] * 2, replaces=False)
    assert registry.sources == [CODE, OTHER_LAW]
    assert changes == [["law"], ["law", "code"], ["code"], ["code", "law"]]


@pytest.mark.parametrize(
    ("name", "path", "workers", "code", "problem"),
    [
        ("law", "/law", [reading(LAW)], "ALREADY_EXISTS", "'law' is loaded already"),
        ("", "/law", [reading(LAW)], "INVALID_ARGUMENT", "name: '' is empty"),
        ("a\n", "/law", [reading(LAW)], "INVALID_ARGUMENT", "not printable"),
        ("x" * 201, "/law", [reading(LAW)], "INVALID_ARGUMENT", "longer than 200 bytes"),
        ("code", "", [reading(CODE)], "INVALID_ARGUMENT", "path: must have 1 to 4096 bytes"),
        ("code", "x" * 4097, [reading(CODE)], "INVALID_ARGUMENT", "1 to 4096 bytes"),
        ("code", "/code", [], "UNAVAILABLE", "no worker is attached"),
        ("code", "/code", [reading(CODE), reading(LinkLost("gone"))], "UNAVAILABLE", "gone"),
        (
            "code",
            "/code",
            [reading(CODE), reading(failing(grpc.StatusCode.INVALID_ARGUMENT, "no folder"))],
            "INVALID_ARGUMENT",
            "no folder",
        ),
        ("code", "/code", [reading(CODE), reading(LAW)], "INVALID_ARGUMENT", "different adapters"),
    ],
)
async def test_a_load_that_fails_leaves_no_name(
    name: str, path: str, workers: list[object], code: str, problem: str
) -> None:
    registry = AdapterRegistry()
    registry.hear([LAW], "first")
    with pytest.raises(AdapterRefused, match=problem) as refused:
        await registry.load(name, path, workers, replaces=False)  # type: ignore[arg-type]
    assert refused.value.code.name == code
    registry.hear([CODE, LAW] if len(workers) == 2 else [], "second")  # one has read it
    assert registry.sources == [LAW]


async def test_an_adapter_replaces_another_of_its_name() -> None:
    registry = AdapterRegistry()
    registry.hear([LAW], "first")
    found = await registry.load("law", "/other", [reading(OTHER_LAW)], replaces=True)
    assert [found] == registry.sources == [OTHER_LAW]


async def test_what_is_not_there_cannot_be_unloaded_and_lost_workers_do_not_matter() -> None:
    registry = AdapterRegistry()
    with pytest.raises(AdapterRefused, match="no adapter is named 'law'") as refused:
        await registry.unload("law", [])
    assert refused.value.code is grpc.StatusCode.NOT_FOUND
    registry.hear([LAW], "first")

    async def lost(name: str) -> None:
        raise LinkLost("gone")

    await registry.unload("law", [lost, nothing])
    assert registry.sources == []


def submit(adapter: AdapterSource | None, grammar: str = "") -> scheduler_pb2.Submit:
    message = None if adapter is None else types_pb2.Adapter(**adapter.fields())
    sampling = types_pb2.SamplingParams(grammar=grammar)
    return scheduler_pb2.Submit(adapter=message, sampling=sampling)


def request_of(submitted: scheduler_pb2.Submit, request_id: str = "a"):  # type: ignore[no-untyped-def]
    origin = Origin(request_id, 0, 0, None)
    tokens = np.arange(3, dtype=np.int32)
    return to_request(submitted, tokens, origin, drawn_seed=1, vocab_size=50, arrival_s=0.0)


def test_a_request_requires_its_adapter_and_a_worker_is_asked_for_it() -> None:
    kinds = (RequirementKind.GRAMMAR, RequirementKind.ADAPTER)
    core = make_scheduler(prepared_kinds=kinds)
    request = request_of(submit(LAW, grammar="start: /a/"))
    assert request.adapter_id == "law@1"
    assert request.requirements == (GRAMMAR, adapter_requirement("law@1"))
    core.add(request)
    asked = core.take_preparations()
    assert asked is not None
    grammars, adapters = to_preparations(asked, kinds)
    (grammar,), (adapter,) = grammars.prepare.preparations, adapters.prepare_adapters.preparations
    assert grammar.grammar == "start: /a/"
    assert AdapterSource.from_message(adapter.adapter) == LAW
    assert {grammar.preparation_id, adapter.preparation_id} == {1, 2}
    core.abort("a")
    dropped = core.take_preparations()
    assert dropped is not None
    frames = to_preparations(dropped, kinds)
    assert [[*frames[0].prepare.dropped_ids], [*frames[1].prepare_adapters.dropped_ids]] == [
        [1, 2],
        [1, 2],
    ]
    assert [frame.WhichOneof("frame") for frame in to_preparations(dropped, kinds[:1])] == [
        "prepare"
    ]


def test_an_adapter_without_an_id_is_refused() -> None:
    with pytest.raises(BadSampling, match="adapter: has no adapter_id"):
        request_of(submit(AdapterSource("law", "/law", "")))


def described(**fields: object) -> worker_pb2.WorkerDescription:
    model = types_pb2.ModelInfo(model="m", vocab_size=50, max_model_len=64, dtype="float32")
    return worker_pb2.WorkerDescription(
        model=model,
        num_blocks=9,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        kv_dtype="float32",
        **fields,  # type: ignore[arg-type]
    )


def test_a_worker_without_adapters_refuses_them_by_name_and_follows_none_with_some() -> None:
    config = service_config(1)
    older = core_config(config, described(max_adapters=4, protocol_minor=5))
    assert older.prepared_kinds == ()
    with pytest.raises(Refused, match="requirements: the worker prepares no adapter") as refused:
        make_scheduler(prepared_kinds=older.prepared_kinds).add(request_of(submit(LAW)))
    assert refused.value.kind is RefusalKind.INVALID
    now = core_config(config, described(max_adapters=4, protocol_minor=6))
    assert now.prepared_kinds == (RequirementKind.ADAPTER,)
    check_successor(now, described(max_adapters=1, protocol_minor=6))
    with pytest.raises(WrongWorker, match="it does not prepare adapters, unlike the worker before"):
        check_successor(now, described(protocol_minor=6))


def test_a_recorded_request_keeps_its_adapter() -> None:
    read = as_read(request_of(submit(LAW)))
    assert read.sampling.adapter == LAW
    assert read.requirements == (adapter_requirement("law@1"),)
