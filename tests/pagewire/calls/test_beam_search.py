"""beam_search as a keyword of calls."""

from typing import Any

import pytest

import pagewire
from pagewire import BeamSearch
from pagewire.testing import FakeServer
from pagewire.v1 import inference_pb2 as pb


@pytest.mark.parametrize(
    ("early_stopping", "sent"),
    [
        (False, pb.EARLY_STOPPING_FALSE),
        (True, pb.EARLY_STOPPING_TRUE),
        ("never", pb.EARLY_STOPPING_NEVER),
    ],
)
def test_a_search_is_sent_with_its_rules(early_stopping: Any, sent: int) -> None:
    beams = BeamSearch(4, -0.5, early_stopping)
    with FakeServer() as server, server.client() as client:
        first = client.generate("Hello", beam_search=beams, n=3)
        client.chat("Hello", beam_search=beams)
        client.generate("Hello", beam_search=None)
    assert len(first.more) == 2
    given, of_chat, none = (received.options for received in server.received)
    assert given.beam_search == of_chat.beam_search
    assert given.beam_search == pb.BeamSearch(
        num_beams=4,
        length_penalty=-0.5,
        early_stopping=sent,  # type: ignore[arg-type]
    )
    assert not none.HasField("beam_search")


@pytest.mark.parametrize(
    ("beams", "name"),
    [
        (4, "beam_search"),
        (BeamSearch(-1), "num_beams"),
        (BeamSearch(2, "long"), "length_penalty"),  # type: ignore[arg-type]
        (BeamSearch(2, early_stopping="soon"), "early_stopping"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_fit_is_refused_by_name(beams: Any, name: str) -> None:
    with FakeServer() as server, server.client() as client:
        with pytest.raises(pagewire.InvalidArgument, match=f"{name}: "):
            client.generate("Hello", beam_search=beams)
        assert not server.received


@pytest.mark.parametrize("method", ["stream", "stream_chat"])
def test_a_stream_of_a_search_is_refused_by_name(method: str) -> None:
    with FakeServer() as server, server.client() as client:
        with pytest.raises(pagewire.InvalidArgument, match="beam_search: "):
            list(getattr(client, method)("Hello", beam_search=BeamSearch(2)))
        assert not server.received
