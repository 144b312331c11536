"""The parts of the CPU benchmark that need no model: prompts, medians, streams, child processes."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from bench.compare import cpu_vs_transformers as bench
from bench.compare.cpu_vs_transformers import ConcurrentRun, StreamTimes
from bench.harness import services
from pagewire.cli.options import CommandError
from pagewire.v1 import inference_pb2, inference_pb2_grpc


def stream(num_tokens: int, first_token_s: float, total_s: float) -> StreamTimes:
    return StreamTimes(tuple(range(num_tokens)), first_token_s, total_s)


def test_the_same_seed_gives_the_same_prompts_and_another_gives_others() -> None:
    first = bench.prompts(7, count=3, length=64, vocab_size=1000)
    assert first == bench.prompts(7, count=3, length=64, vocab_size=1000)
    assert first != bench.prompts(8, count=3, length=64, vocab_size=1000)
    assert [len(p) for p in first] == [64, 64, 64]
    assert all(17 <= token_id < 1000 for prompt in first for token_id in prompt)
    assert len({p[0] for p in first}) > 1  # not the same prompt repeated


def test_a_row_holds_the_median_over_runs() -> None:
    runs = [ConcurrentRun((stream(11, 0.5, total_s),), total_s) for total_s in (1.5, 2.5, 10.5)]
    row = bench.row("pagewire", runs)
    assert row.tokens_per_s == round(11 / 2.5, 2)
    assert row.tokens_per_s_each_run == (7.33, 4.4, 1.05)
    assert row.first_token_ms == 500.0
    assert row.ms_per_token == 200.0  # (2.5 - 0.5) s for the ten tokens after the first


def test_throughput_counts_every_stream_over_the_wall_time() -> None:
    assert (
        ConcurrentRun((stream(10, 0.1, 1.0), stream(30, 0.1, 2.0)), wall_s=2.0).tokens_per_s == 20.0
    )


def test_the_table_compares_every_row_with_the_first() -> None:
    slow = bench.row("transformers", [ConcurrentRun((stream(11, 1.0, 2.0),), 2.0)])
    fast = bench.row("pagewire", [ConcurrentRun((stream(11, 0.5, 1.0),) * 16, 1.0)])
    header, first, second = bench.table([slow, fast]).splitlines()
    assert len({len(header), len(first), len(second)}) == 1
    assert first.split()[0] == "transformers" and first.endswith(" 1.00")
    assert second.split()[:2] == ["pagewire", "16"] and second.endswith("32.00")


def test_equal_outputs_are_counted_and_different_ones_are_not() -> None:
    one = [ConcurrentRun((StreamTimes((1, 2), 1, 1), StreamTimes((3, 4), 1, 1)), 1)]
    other = [ConcurrentRun((StreamTimes((1, 2), 2, 2), StreamTimes((3, 5), 2, 2)), 2)]
    assert bench.same_outputs(one, other).startswith("1 of 2 ")


class Echo(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with the prompt's first id, two tokens per message, and records requests."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.asked: list[inference_pb2.GenerateStreamRequest] = []

    async def GenerateStream(
        self,
        request: inference_pb2.GenerateStreamRequest,
        context: "grpc.aio.ServicerContext",
    ) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        self.asked.append(request)
        ids = [request.prompt.token_ids.ids[0]] * 2
        for _ in range(self.num_tokens // 2):
            yield inference_pb2.GenerateStreamResponse(
                delta=inference_pb2.OutputDelta(token_ids=ids)
            )


@pytest.mark.parametrize("num_tokens", [8, 6])
async def test_a_run_streams_all_its_prompts_and_the_warm_up_is_dropped(num_tokens: int) -> None:
    service = Echo(num_tokens)
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        batches = [[[20], [21]], [[22], [23]], [[24], [25]]]
        runs = await bench.measure_pagewire(f"127.0.0.1:{port}", batches, num_tokens)
        with pytest.raises(services.ProductFailed, match=f"asked for 99 tokens, got {num_tokens}"):
            await bench.measure_pagewire(f"127.0.0.1:{port}", [[[20]]], 99)
    finally:
        await server.stop(None)
    assert [[s.token_ids[0] for s in run.streams] for run in runs] == [[22, 23], [24, 25]]
    assert all(0 < s.first_token_s <= s.total_s <= r.wall_s for r in runs for s in r.streams)
    sampling = service.asked[0].options.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.ignore_eos) == (0, num_tokens, True)
    assert sampling.HasField("temperature")  # absent would mean 1


def test_ports_differ_from_each_other() -> None:
    ports = services.free_ports()
    assert len({ports.worker, ports.scheduler, ports.gateway_http, ports.gateway_grpc}) == 4


def test_a_service_that_ends_is_named_with_its_last_words(tmp_path: Path) -> None:
    last_words = r"(?s)the (worker|gateway) ended with status \d+[;:] .*" + re.escape(str(tmp_path))
    with pytest.raises(CommandError, match=last_words), services.running(tmp_path):
        pytest.fail("an empty folder cannot be served")


def test_the_environment_names_hardware_versions_and_commit() -> None:
    environment = bench.environment(load_before=0.5)
    assert environment["load_before"] == 0.5
    assert "cores" in str(environment["hardware"])
    assert set(bench.LIBRARIES) < set(environment["versions"])  # type: ignore[call-overload]
    assert len(str(environment["commit"]).rstrip("+")) == 12
