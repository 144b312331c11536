"""The wire format, frozen: what one release writes, every other release reads.

`fields.txt` holds every field of every message with its bytes, every enum value and every method;
`messages.txt` holds whole messages as the services exchange them. A change that only adds needs new
lines; a change to a line that exists breaks every deployed peer. After adding, write the files anew
with PAGEWIRE_WRITE_GOLDEN=1 and read the difference: it must have no removed line.
"""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pagewire.v1 import (
    debug_pb2,
    embedding_pb2,
    fleet_pb2,
    inference_pb2,
    journal_pb2,
    live_pb2,
    rank_pb2,
    scheduler_pb2,
    timing_pb2,
    types_pb2,
    worker_pb2,
)
from tests.protos.messages import EXCHANGED
from wire.columns import UINT8, UINT32, pack
from wire.logprobs import LogprobColumns

FOLDER = Path(__file__).parent
MODULES = (
    types_pb2,
    inference_pb2,
    embedding_pb2,
    scheduler_pb2,
    worker_pb2,
    debug_pb2,
    journal_pb2,
    rank_pb2,
    timing_pb2,
    fleet_pb2,
    live_pb2,
)
SAMPLING = types_pb2.SamplingParams(
    temperature=0.5,
    top_p=0.25,
    top_k=-1,
    min_p=0.125,
    seed=1 << 63,
    max_tokens=128,
    min_tokens=0,  # written, because absence has another meaning
    stop_token_ids=[2, 300],
    ignore_eos=False,
)

MESSAGES: dict[str, Message] = {
    "ask for a completion": inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(text="Ἐν ἀρχῇ"),
        options=inference_pb2.GenerationOptions(
            model="m", request_id="r-1", sampling=SAMPLING, stop=["\n\n"], skip_special_tokens=False
        ),
    ),
    "complete these tokens": inference_pb2.GenerateStreamRequest(
        prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[0, 1, 127, 128, 49151]))
    ),
    "the last piece of an answer": inference_pb2.ChatStreamResponse(
        request_id="r-1",
        model="m",
        delta=inference_pb2.OutputDelta(
            text=".",
            token_ids=[30],
            finish_reason=types_pb2.FINISH_REASON_STOP,
            stop_token_id=0,
            usage=types_pb2.Usage(prompt_tokens=70, completion_tokens=9, cached_tokens=64),
        ),
    ),
    "submit": scheduler_pb2.SessionRequest(
        submit=scheduler_pb2.Submit(
            handle=7, request_id="r-1", prompt_token_ids=pack([1, 4093, 198]), sampling=SAMPLING
        )
    ),
    "abort": scheduler_pb2.SessionRequest(abort=scheduler_pb2.AbortHandle(handle=0)),
    "one step's tokens for two requests": scheduler_pb2.SessionResponse(
        handles=pack([7, 9], UINT32),
        token_ids=pack([504, 2]),
        finished=[scheduler_pb2.Finished(handle=9, reason=types_pb2.FINISH_REASON_LENGTH)],
    ),
    "attach": worker_pb2.AttachRequest(
        hello=worker_pb2.Hello(protocol_version=1, epoch=3, first_step_id=1)
    ),
    "the first step of a sequence": worker_pb2.AttachRequest(
        step=worker_pb2.SchedulerOutput(
            step_id=1,
            reset=True,
            new_sequences=[
                worker_pb2.NewSequence(
                    slot=0,
                    request_id="r-1",
                    token_ids=pack([1, 4093, 198]),
                    num_prompt_tokens=3,
                    block_ids=pack([1]),
                    sampling=worker_pb2.RowSampling(top_p=1.0, seed=5, stop_token_ids=[2]),
                )
            ],
            slots=pack([0]),
            num_scheduled=pack([3]),
        )
    ),
    "a steady decode step that gains a block": worker_pb2.AttachRequest(
        step=worker_pb2.SchedulerOutput(
            step_id=300,
            ack_step_id=298,
            freed_slots=pack([4]),
            appended_slots=pack([2]),
            appended_block_ids=pack([77]),
            same_rows=True,
        )
    ),
    "a step's output with a bad row": worker_pb2.AttachResponse(
        output=worker_pb2.ModelRunnerOutput(
            step_id=300,
            token_ids=pack([504, 0]),
            row_status=pack([0, worker_pb2.ROW_STATUS_NOT_FINITE], UINT8),
            timings=timing_pb2.StepTimings(queue_us=1, prepare_us=2, forward_us=900, sample_us=3),
        )
    ),
    "a step in words": debug_pb2.ListStepsResponse(
        steps=[
            debug_pb2.StepSummary(
                step_id=300,
                num_decode_rows=1,
                num_tokens=1,
                rows=[debug_pb2.StepRow(request_id="r-1", num_scheduled_tokens=1)],
                summary="step 300",
            )
        ]
    ),
    "what a step found out about a prompt": worker_pb2.AttachResponse(
        output=worker_pb2.ModelRunnerOutput(
            step_id=301,
            prompt_outputs=[
                types_pb2.PromptOutput(
                    owner=2, begin=16, count=2, hidden_sum=b"\0\0\x80\x3f\0\0\0\x40"
                ),
                types_pb2.PromptOutput(owner=3, count=1, not_finite=True),
            ],
        )
    ),
    "embed a prompt": scheduler_pb2.SessionRequest(
        submit=scheduler_pb2.Submit(
            handle=8,
            request_id="r-2",
            prompt_token_ids=pack([1, 4093, 198]),
            pooling=types_pb2.POOLING_MEAN,
        )
    ),
    "one step's log probabilities": scheduler_pb2.SessionResponse(
        handles=pack([7, 9], UINT32),
        token_ids=pack([504, 2]),
        logprobs=types_pb2.LogprobColumns(
            **LogprobColumns(
                rows=np.array([1]),
                logprobs=np.array([-0.5], dtype=np.float32),
                ranks=np.array([1]),
                top_token_ids=np.array([[2, 504]]),
                top_logprobs=np.array([[-0.5, -1.25]], dtype=np.float32),
            ).pack()
        ),
    ),
    **EXCHANGED,
}


def files() -> list[FileDescriptor]:
    return [module.DESCRIPTOR for module in MODULES]


def value_for(field: FieldDescriptor) -> object:
    """A value that differs between neighbouring fields: it depends on the name, not the number."""
    number = zlib.crc32(field.name.encode()) % 100_000 + 1
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return field.name
        case FieldDescriptor.TYPE_BYTES:
            return field.name.encode()
        case FieldDescriptor.TYPE_BOOL:
            return True
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return number / 8
        case FieldDescriptor.TYPE_ENUM:
            return max(field.enum_type.values_by_number)
        case FieldDescriptor.TYPE_INT32:
            return -number  # differs from sint32's reading of the same bytes
        case FieldDescriptor.TYPE_UINT32 | FieldDescriptor.TYPE_UINT64:
            return number
        case FieldDescriptor.TYPE_FIXED32 | FieldDescriptor.TYPE_FIXED64:
            return number
    raise AssertionError(f"{field.full_name} has a type this test does not know")


def with_only(field: FieldDescriptor) -> Message:
    """A message in which one field is set."""
    message: Message = GetMessageClass(field.containing_type)()
    if field.message_type is not None:
        item = getattr(message, field.name)
        if field.is_repeated:
            item.add()
        else:
            item.SetInParent()
    elif field.is_repeated:
        getattr(message, field.name).extend([value_for(field)] * 2)
    else:
        setattr(message, field.name, value_for(field))
    return message


def all_messages() -> Iterator[Descriptor]:
    for file in files():
        yield from file.message_types_by_name.values()


def lines_of_fields() -> list[str]:
    """Every field, enum value and method of the package, a line each."""
    lines = [
        f"field {field.full_name} {with_only(field).SerializeToString(deterministic=True).hex()}"
        for message in all_messages()
        for field in message.fields
    ]
    for file in files():
        for enum in file.enum_types_by_name.values():
            lines += [f"enum {enum.full_name}.{v.name} {v.number}" for v in enum.values]
        for service in file.services_by_name.values():
            for method in service.methods:
                asks = "stream " * method.client_streaming + method.input_type.name
                answers = "stream " * method.server_streaming + method.output_type.name
                lines.append(f"rpc {service.full_name}/{method.name} ({asks}) ({answers})")
    return sorted(lines)


def lines_of_messages() -> list[str]:
    return [
        f"{m.DESCRIPTOR.name} | {title} | {m.SerializeToString(deterministic=True).hex()}"
        for title, m in MESSAGES.items()
    ]


def golden(name: str, current: list[str]) -> list[str]:
    path = FOLDER / name
    if os.environ.get("PAGEWIRE_WRITE_GOLDEN"):
        path.write_text("\n".join(current) + "\n")
    return path.read_text().splitlines()


def test_no_field_enum_value_or_method_has_changed() -> None:
    current = lines_of_fields()
    frozen = golden("fields.txt", current)
    assert sorted(set(frozen) - set(current)) == [], "these lines changed or went away"
    assert sorted(set(current) - set(frozen)) == [], "these lines are new: write the file anew"


def test_frozen_fields_are_still_understood() -> None:
    classes = {message.full_name: message for message in all_messages()}
    frozen = [line.split() for line in golden("fields.txt", lines_of_fields())]
    fields = [(name, bytes.fromhex(text)) for kind, name, text, *_ in frozen if kind == "field"]
    assert len(fields) > 150
    for name, data in fields:
        owner, _, field = name.rpartition(".")
        expected = with_only(classes[owner].fields_by_name[field])
        assert GetMessageClass(classes[owner]).FromString(data) == expected, name


@pytest.mark.parametrize("title", MESSAGES)
def test_a_message_is_the_same_bytes_as_ever_in_both_directions(title: str) -> None:
    table = {line.split(" | ")[1]: line for line in golden("messages.txt", lines_of_messages())}
    name, _, text = table[title].split(" | ")
    message = MESSAGES[title]
    assert message.DESCRIPTOR.name == name
    assert message.SerializeToString(deterministic=True).hex() == text
    assert type(message).FromString(bytes.fromhex(text)) == message


def test_every_frozen_message_is_still_tested() -> None:
    titles = [line.split(" | ")[1] for line in golden("messages.txt", lines_of_messages())]
    assert titles == list(MESSAGES)
