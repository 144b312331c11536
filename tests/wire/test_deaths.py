"""Three tiers count deaths and may not import each other: what they count by is the same."""

import grpc
import pytest

from pagewire._attempts import resume
from pagewire._connection import status_details
from scheduler_svc.core.request import blame
from wire import deaths
from wire.deaths import PeerLoss


def test_a_request_dies_of_as_many_deaths_in_every_tier() -> None:
    found = {(tier.MAX_DEATHS, tier.MAX_DEATHS_IN_ALL) for tier in (deaths, blame, resume)}
    assert len(found) == 1


def test_the_sdk_knows_every_planned_end_that_the_services_know() -> None:
    assert set(deaths._PLANNED) <= set(status_details._STOPPED)
    assert set(deaths._UNREACHED) == set(status_details._UNREACHED)


@pytest.mark.parametrize(
    ("details", "dies"),
    [
        ("Socket closed", True),
        ("recvmsg:Connection reset by peer", True),
        ("GOAWAY received", False),
        ("Cancelling all calls", False),
        ("failed to connect to all addresses; Connection refused", False),
        ("this scheduler is shutting down", False),
        ("connections to all backends failing; last error: recvmsg:Connection reset", False),
        ("last error: Failed to connect to remote host: Connection reset by peer", False),
    ],
)
def test_both_call_the_same_ends_deaths(details: str, dies: bool) -> None:
    none = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, details)
    assert deaths.is_death(error) is status_details.is_death(error) is dies


@pytest.mark.parametrize(
    ("code", "details", "trailing", "loss"),
    [
        ("UNAVAILABLE", "Socket closed", (), PeerLoss.UNCLEAR),
        ("UNAVAILABLE", "this scheduler is shutting down", (), PeerLoss.HARMLESS),
        ("INTERNAL", "Internal error from Core", (), PeerLoss.UNCLEAR),
        ("INTERNAL", "Received RST_STREAM with error code 2", (), PeerLoss.UNCLEAR),
        ("INTERNAL", "ValueError: what", deaths.OWN_END, PeerLoss.OWN_END),
        ("INVALID_ARGUMENT", "slots: a slot appears twice", (), PeerLoss.OWN_END),
        ("UNKNOWN", "Unexpected <class 'ValueError'>: what", (), PeerLoss.OWN_END),
        ("UNKNOWN", "Exception calling application: what", (), PeerLoss.OWN_END),
        ("UNKNOWN", "Stream removed", (), PeerLoss.HARMLESS),
        ("DATA_LOSS", "frame 3 of the stream came, expected 2", (), PeerLoss.HARMLESS),
        ("ABORTED", "a scheduler attached with epoch 7", (), PeerLoss.HARMLESS),
    ],
)
def test_an_end_that_the_peer_chose_is_told_from_a_connection_that_broke(
    code: str, details: str, trailing: tuple[tuple[str, str], ...], loss: PeerLoss
) -> None:
    metadata = grpc.aio.Metadata(*trailing)
    status = getattr(grpc.StatusCode, code)
    error = grpc.aio.AioRpcError(status, grpc.aio.Metadata(), metadata, details)
    assert deaths.loss_of(error) is loss
