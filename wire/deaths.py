"""Tells the death of a peer from its planned end, by the status of the stream that broke.

A status alone cannot tell a death from a lost connection: where a peer says which instance it is, a
death counts only once another one has answered.
"""

from enum import Enum

import grpc

# Then a request ends and is not submitted again. Tokens between deaths show that it can go on, so
# many of those are needed before it is the likely cause of them.
MAX_DEATHS = 2  # in a row, without a new token
MAX_DEATHS_IN_ALL = 16

# A server that is stopped says so, in our words or in those of gRPC's GOAWAY.
_PLANNED = ("shutting down", "stopping", "draining", "GOAWAY", "Cancelling all calls")
# No stream was opened: nothing of ours ran there.
_UNREACHED = ("failed to connect", "Connection refused", "connections to all backends failing")


def is_death(error: BaseException) -> bool:
    """True if a stream broke because the process at its other end died, or the connection was lost.

    One that was told to end, or that was never reached, is no death. The SDK has the same rule.
    """
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    details = (error.details() or "").lower()  # gRPC writes "Failed to connect", too
    return not any(words.lower() in details for words in (*_PLANNED, *_UNREACHED))


class PeerLoss(Enum):
    """The meaning of a stream's end for the process at its other end."""

    DEATH = "death"  # it hangs, or it says that it failed
    UNCLEAR = "unclear"  # it died, or the connection was lost: its next answer tells
    HARMLESS = "harmless"  # it was asked to end, was never reached, or a frame was lost on the way
    OWN_END = "own end"  # it lives, and ended the stream by itself: it may do so again


# Trailing metadata of a status that a handler chose for an error of its own. Without it INTERNAL is
# gRPC's word for a connection that broke under a write.
OWN_END = (("pagewire-own-end", "1"),)
_UNHANDLED = ("Unexpected", "Exception calling application")  # gRPC's words for our exceptions


def loss_of(error: grpc.aio.AioRpcError) -> PeerLoss:
    """The fate of the peer of a stream that broke."""
    code, details = error.code(), error.details() or ""
    is_unhandled = code is grpc.StatusCode.UNKNOWN and details.startswith(_UNHANDLED)
    is_told = tuple(OWN_END[0]) in {tuple(pair) for pair in error.trailing_metadata() or ()}
    if code is grpc.StatusCode.INVALID_ARGUMENT or is_unhandled or is_told:
        return PeerLoss.OWN_END
    if code is grpc.StatusCode.INTERNAL or is_death(error):
        return PeerLoss.UNCLEAR
    return PeerLoss.HARMLESS
