"""structured_output as protobuf messages."""

import json

import pytest

import pagewire
from pagewire import Choice, Grammar, JsonObject, JsonSchema, Regex, SamplingParams
from pagewire.v1 import inference_pb2 as pb
from tests.pace import patience

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
FORMS = [
    (JsonSchema(json.dumps(SCHEMA)), pb.StructuredOutput(json_schema=json.dumps(SCHEMA))),
    (JsonSchema(SCHEMA), pb.StructuredOutput(json_schema=json.dumps(SCHEMA))),
    (JsonSchema(True, ""), pb.StructuredOutput(json_schema="true", whitespace_pattern="")),
    (JsonObject(), pb.StructuredOutput(json_object=pb.JsonObject())),
    (Regex("a+"), pb.StructuredOutput(regex="a+")),
    (Choice("yes", "no"), pb.StructuredOutput(choice=pb.Choice(options=["yes", "no"]))),
    (Grammar('start: "a"'), pb.StructuredOutput(grammar='start: "a"')),
]


@pytest.fixture
def client(gateway):
    with pagewire.Client(gateway.target, timeout_s=patience(20)) as client:
        yield client


@pytest.mark.parametrize(("form", "sent"), FORMS, ids=str)
def test_every_form_travels_as_it_was_given(client, gateway, form, sent):
    client.generate("Q", structured_output=form)
    client.stream_chat("Q", SamplingParams(structured_output=form)).completion()
    assert [request.options.structured_output for request in gateway.requests] == [sent, sent]


def test_without_it_nothing_is_said(client, gateway):
    client.generate("Q")
    assert not gateway.requests[0].options.HasField("structured_output")


@pytest.mark.parametrize("wrong", [SCHEMA, "a+", JsonSchema({"a": object()}), Choice(3), Regex(3)])
def test_what_is_no_form_is_refused_by_name(client, wrong):
    with pytest.raises(pagewire.InvalidArgument, match=r"^structured_output: "):
        client.generate("Q", structured_output=wrong)
