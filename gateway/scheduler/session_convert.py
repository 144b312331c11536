"""Converts hints about sessions between the gateway's values and protobuf messages."""

from gateway.request.client_session import ClientSession, name_of
from pagewire.v1 import scheduler_pb2, types_pb2


def session_to_proto(session: ClientSession) -> types_pb2.SessionHint:
    """A session, for the scheduler."""
    return types_pb2.SessionHint(
        session_id=session.session_id,
        parent_session_id=session.parent_id,
        ttl_s=session.ttl_s,
        prefix_key=session.prefix_key,
    )


def session_from_proto(message: types_pb2.SessionHint) -> ClientSession:
    """A session from a gRPC client; a time that is none counts as not told."""
    is_told = message.HasField("ttl_s") and message.ttl_s >= 0
    return ClientSession(
        session_id=name_of(message.session_id),
        parent_id=name_of(message.parent_session_id),
        ttl_s=message.ttl_s if is_told else None,
        prefix_key=name_of(message.prefix_key),
    )


def end_session_to_proto(session_id: str, cache_salt: str) -> scheduler_pb2.SessionRequest:
    """The end of a session, for the scheduler."""
    ended = scheduler_pb2.EndSession(session_id=session_id, cache_salt=cache_salt)
    return scheduler_pb2.SessionRequest(end_session=ended)
