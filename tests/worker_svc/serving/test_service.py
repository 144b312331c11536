"""The worker through its gRPC service, against transformers and against itself."""

import dataclasses
import time
from pathlib import Path

import grpc
import pytest
import torch

from kernels.gemm.cublas_lt import GemmKind, GemmShape
from pagewire.v1 import debug_pb2, debug_pb2_grpc, timing_pb2, worker_pb2
from tests.worker_svc.conftest import (
    VOCAB_SIZE,
    Attachment,
    Greedy,
    Worker,
    make_prompt,
    make_sequence,
)
from wire.grammar import LLGUIDANCE_VERSION
from worker_svc.models.gemm_choices import GemmChoice
from worker_svc.serving.service import to_description


def generate(
    attachment: Attachment,
    prompts: list[list[int]],
    num_tokens: int,
    *,
    chunk: int = 1000,
    sampling: worker_pb2.RowSampling | None = None,
) -> list[list[int]]:
    """Generates num_tokens for each prompt, in chunks, all in one batch."""
    sampling = sampling or worker_pb2.RowSampling(top_p=1)
    slots = list(range(len(prompts)))
    # Blocks are dealt round robin, so that no sequence's blocks are adjacent.
    new = [
        make_sequence(slot, prompt, list(range(1 + slot, 64, len(prompts)))[:12], sampling=sampling)
        for slot, prompt in enumerate(prompts)
    ]
    computed = dict.fromkeys(slots, 0)
    outputs: list[list[int]] = [[] for _ in slots]
    while active := [slot for slot in slots if len(outputs[slot]) < num_tokens]:
        known = {slot: len(prompts[slot]) + len(outputs[slot]) for slot in active}
        counts = [min(chunk, known[slot] - computed[slot]) for slot in active]
        tokens = iter(attachment.step(new_sequences=new, slots=active, num_scheduled=counts))
        for slot, num_scheduled in zip(active, counts, strict=True):
            computed[slot] += num_scheduled
            if computed[slot] == known[slot]:
                outputs[slot].append(next(tokens))
        assert next(tokens, None) is None
        new = []
    return outputs


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
def test_greedy_tokens_equal_transformers(
    worker: Worker, greedy: Greedy, length: int, chunk: int
) -> None:
    prompt = make_prompt(length)
    expected = greedy(prompt, 12)
    assert len(set(expected)) > 3
    assert generate(worker.attach(), [prompt], 12, chunk=chunk) == [expected]


@pytest.mark.parametrize("chunk", [5, 1000])
def test_a_batch_gives_each_row_what_it_gets_alone(
    worker: Worker, greedy: Greedy, chunk: int
) -> None:
    prompts = [make_prompt(length, seed=length) for length in (1, 16, 31, 33)]
    expected = [greedy(prompt, 8) for prompt in prompts]
    assert generate(worker.attach(), prompts, 8, chunk=chunk) == expected


def test_sampled_tokens_do_not_depend_on_batch_chunks_or_slot(worker: Worker) -> None:
    sampling = worker_pb2.RowSampling(temperature=1.0, top_p=0.95, seed=(1 << 64) - 5)
    prompts = [make_prompt(length, seed=length) for length in (9, 20, 33)]
    together = generate(worker.attach(), prompts, 10, sampling=sampling)
    in_chunks = generate(worker.attach(), prompts, 10, chunk=4, sampling=sampling)
    alone = [generate(worker.attach(), [p], 10, sampling=sampling)[0] for p in prompts]
    backwards = generate(worker.attach(), prompts[::-1], 10, sampling=sampling)[::-1]
    assert together == in_chunks == alone == backwards
    other = worker_pb2.RowSampling(temperature=1.0, top_p=0.95, seed=6)
    assert generate(worker.attach(), prompts, 10, sampling=other) != together


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened(
    worker: Worker, temperature: float
) -> None:
    sampling = worker_pb2.RowSampling(temperature=temperature, top_p=0.9, seed=3, min_tokens=9)
    sampling.stop_token_ids.extend(range(40, 100))
    prompt = make_prompt(20)
    calm = generate(worker.attach(), [prompt], 10, sampling=sampling)[0]
    attachment = worker.attach()
    first = generate(attachment, [prompt], 4, sampling=sampling)[0]
    assert first == calm[:4]
    resumed = make_sequence(
        3,
        prompt + first,
        [50, 40, 30, 20],
        num_prompt_tokens=len(prompt),
        sampling=sampling,
    )
    rest = attachment.step(
        freed_slots=[0], new_sequences=[resumed], slots=[3], num_scheduled=[len(prompt) + 4]
    )
    for _ in range(5):
        rest += attachment.step(slots=[3])
    assert first + rest == calm


def test_two_steps_in_flight_give_what_one_gives(worker: Worker, greedy: Greedy) -> None:
    prompts = [make_prompt(length, seed=length) for length in (5, 30)]
    expected = [greedy(prompt, 10) for prompt in prompts]
    attachment = worker.attach()
    new = [make_sequence(slot, p, [1 + slot, 5 + slot, 9 + slot]) for slot, p in enumerate(prompts)]
    attachment.send(new_sequences=new, slots=[0, 1], num_scheduled=[5, 30])
    outputs: list[list[int]] = []
    for _ in range(9):
        # Sent before the client knows the tokens that it depends on.
        attachment.send(same_rows=True)
        outputs.append(list(attachment_tokens(attachment)))
    outputs.append(list(attachment_tokens(attachment)))
    assert [list(tokens) for tokens in zip(*outputs, strict=True)] == expected


def attachment_tokens(attachment: Attachment) -> memoryview:
    output = attachment.receive()
    assert not output.error
    return memoryview(output.token_ids).cast("i")


def test_more_than_two_steps_in_flight_wait_their_turn(worker: Worker, greedy: Greedy) -> None:
    prompt = make_prompt(6)
    attachment = worker.attach()
    attachment.send(new_sequences=[make_sequence(0, prompt, [1, 2])], slots=[0], num_scheduled=[6])
    for _ in range(7):
        attachment.send(same_rows=True)
    tokens = [token for _ in range(8) for token in attachment_tokens(attachment)]
    assert tokens == greedy(prompt, 8)


def test_cached_prefix_blocks_give_the_same_tokens(worker: Worker, greedy: Greedy) -> None:
    shared = make_prompt(32, seed=1)
    first, second = shared + make_prompt(5, seed=2), shared + make_prompt(9, seed=3)
    attachment = worker.attach()
    tokens = attachment.step(
        new_sequences=[make_sequence(0, first, [7, 3, 9])], slots=[0], num_scheduled=[37]
    )
    assert tokens == greedy(first, 1)
    hit = make_sequence(1, second, [7, 3, 11], num_computed_tokens=32)
    tokens = attachment.step(new_sequences=[hit], slots=[1], num_scheduled=[9])
    for _ in range(3):
        tokens += attachment.step(slots=[1])
    assert tokens == greedy(second, 4)


def test_blocks_appended_one_by_one_serve_a_growing_sequence(
    worker: Worker, greedy: Greedy
) -> None:
    prompt = make_prompt(16)
    attachment = worker.attach()
    tokens = attachment.step(
        new_sequences=[make_sequence(2, prompt, [8])], slots=[2], num_scheduled=[16]
    )
    blocks = iter([60, 4, 33])
    for position in range(16, 50):
        grows = position % 16 == 0
        tokens += attachment.step(
            appended_slots=[2] if grows else [],
            appended_block_ids=[next(blocks)] if grows else [],
            slots=[2],
        )
    assert tokens == greedy(prompt, 35)


def test_a_sequence_may_end_at_the_models_length_and_one_step_past_it(
    worker: Worker, greedy: Greedy
) -> None:
    prompt = make_prompt(190)
    attachment = worker.attach()
    new = make_sequence(0, prompt, list(range(1, 13)))
    assert attachment.step(new_sequences=[new], slots=[0], num_scheduled=[95]) == []
    tokens = attachment.step(slots=[0], num_scheduled=[95])
    tokens += attachment.step(slots=[0])
    tokens += attachment.step(slots=[0])
    assert tokens == greedy(prompt, 3)
    attachment.send(slots=[0])
    assert attachment.status() is grpc.StatusCode.INVALID_ARGUMENT


def test_minimum_tokens_hold_back_every_stop_token(worker: Worker, greedy: Greedy) -> None:
    prompt = make_prompt(10)
    stop = greedy(prompt, 1)[0]
    sampling = worker_pb2.RowSampling(top_p=1, min_tokens=3, stop_token_ids=[stop])
    tokens = generate(worker.attach(), [prompt], 6, sampling=sampling)[0]
    assert stop not in tokens[:3]
    sampling.min_tokens = 0
    assert generate(worker.attach(), [prompt], 6, sampling=sampling)[0][0] == stop


def test_freeing_without_computing_is_a_step(worker: Worker) -> None:
    attachment = worker.attach()
    assert attachment.step(new_sequences=[make_sequence(1, [5], [3])]) == []
    assert worker.describe().num_live_slots == 1
    assert attachment.step(freed_slots=[1]) == []
    assert worker.describe().num_live_slots == 0


def test_timings_account_for_a_step(worker: Worker) -> None:
    attachment = worker.attach()
    attachment.send(new_sequences=[make_sequence(0, [5, 6], [1])], slots=[0], num_scheduled=[2])
    timings = attachment.receive().timings
    assert timings.forward_us > 0
    assert timings.sample_us > 0
    assert timings.prepare_us > 0


def test_a_worker_describes_what_its_device_did_with_decode_steps(worker: Worker) -> None:
    before = worker.describe().decode_time
    generate(worker.attach(), [[5, 6, 7]], 5)  # a prefill and four decodes
    after = worker.describe().decode_time
    assert after.num_steps - before.num_steps == 4
    assert after.busy_us > before.busy_us
    assert after.idle_us > before.idle_us  # the device idles between single steps


def test_the_debug_service_tells_who_holds_a_slot_and_what_ran(worker: Worker) -> None:
    stub = debug_pb2_grpc.DebugServiceStub(worker.channel)
    attachment = worker.attach()
    sampling = worker_pb2.RowSampling(temperature=0.5, top_p=0.9, seed=4)
    new = [
        make_sequence(2, [5, 6, 7], [9, 4], request_id="a", sampling=sampling),
        make_sequence(0, [8], [3], request_id="b"),
    ]
    attachment.step(new_sequences=new, slots=[2, 0], num_scheduled=[2, 1])
    listed = stub.ListRequests(debug_pb2.ListRequestsRequest(limit=1))
    assert (listed.total, [r.request_id for r in listed.requests]) == (2, ["a"])
    described = stub.DescribeRequest(debug_pb2.DescribeRequestRequest(request_id="a"))
    assert described.block_ids == [9, 4]
    assert described.sampling == "temperature 0.5; seed 4; top_p 0.9"
    assert (described.request.slot, described.request.num_computed_tokens) == (2, 2)
    step = stub.ListSteps(debug_pb2.ListStepsRequest(limit=1)).steps[0]
    assert (step.step_id, step.num_prefill_rows, step.num_decode_rows) == (1, 1, 1)
    assert [(row.request_id, row.num_scheduled_tokens) for row in step.rows] == [("a", 2), ("b", 1)]
    with pytest.raises(grpc.RpcError) as missing:
        stub.DescribeRequest(debug_pb2.DescribeRequestRequest(request_id="c"))
    assert missing.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as elsewhere:
        stub.DumpBlockPool(debug_pb2.DumpBlockPoolRequest())
    assert elsewhere.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "scheduler" in elsewhere.value.details()


def test_an_idle_worker_costs_no_cpu(worker: Worker) -> None:
    worker.attach().step()
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_what_is_served_is_described(worker: Worker, llama_folder: Path) -> None:
    described = worker.describe()
    assert described.phase == worker_pb2.WORKER_PHASE_READY
    model = described.description.model
    assert model.model == llama_folder.name
    assert model.architecture == "LlamaForCausalLM"
    assert (model.vocab_size, model.max_model_len) == (VOCAB_SIZE, 192)
    assert list(model.eos_token_ids) == [2]
    assert len(model.config_sha256) == 64
    assert model.tokenizer_sha256 == ""
    assert model.llguidance_version == LLGUIDANCE_VERSION
    assert described.description.incarnation > 0
    assert described.description.num_blocks == 64


def test_what_was_measured_of_products_is_told(worker: Worker) -> None:
    described = worker.server.lifecycle.description
    assert described is not None
    assert to_description(described).gemm_timings == []
    shape = GemmShape(224, GemmKind(4096, 12288, torch.bfloat16, adds=True))
    choices = {shape: GemmChoice(b"quick", 36.5, 47.1)}
    told = to_description(dataclasses.replace(described, gemm_choices=choices)).gemm_timings
    assert told == [
        timing_pb2.GemmTiming(
            num_rows=224, num_outputs=4096, num_inputs=12288, adds=True, torch_us=47.1, us=36.5
        )
    ]
