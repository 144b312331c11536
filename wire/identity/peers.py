"""The client side of the connections between services: TLS, certificate and token.

Files that change are used for the next call: it opens a new channel, and calls that run on the old
one go on there.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import grpc

from wire.identity.access import watched_tokens
from wire.identity.certificates import check_client_files
from wire.identity.options import IdentityOptions
from wire.identity.watched import Watched

Options = Sequence[tuple[str, int | str]]
Metadata = tuple[tuple[str, str], ...]
_UNTIL_CALLS_END_S = 365 * 24 * 3600.0


OpenPeer = Callable[[str, Options], grpc.aio.Channel]


def open_plain(address: str, options: Options) -> grpc.aio.Channel:
    """A channel without TLS and token."""
    return grpc.aio.insecure_channel(address, options=options)


def peer_opener(identity: IdentityOptions) -> OpenPeer:
    """Opens channels to the services that this one calls. Raises BadIdentityFile."""
    token, ca = identity.peer_token_file, identity.tls_ca
    if token is None and ca is None:
        return open_plain
    tokens = None if token is None else watched_tokens(token)
    credentials = None
    if ca is not None:
        cert, key = identity.tls_client_cert, identity.tls_client_key
        paths = [path for path in (ca, cert, key) if path is not None]
        credentials = Watched("--tls-ca", paths, partial(_credentials, ca, cert, key))
    return lambda address, options: PeerChannel(address, options, credentials, tokens)


def _credentials(ca: Path, cert: Path | None, key: Path | None) -> grpc.ChannelCredentials:
    check_client_files(ca, cert, key)
    read = [None if path is None else path.read_bytes() for path in (ca, key, cert)]
    return grpc.ssl_channel_credentials(*read)


class PeerChannel(grpc.aio.Channel):
    """A channel whose calls carry the token and use the certificates as they are now."""

    def __init__(
        self,
        address: str,
        options: Options,
        credentials: Watched[grpc.ChannelCredentials] | None,
        tokens: Watched[tuple[str, ...]] | None,
    ) -> None:
        self._address = address
        self._options = options
        self._watched = credentials
        self._tokens = tokens
        self._credentials: grpc.ChannelCredentials | None = None
        self._closing: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._open = self._channel()

    def _channel(self) -> grpc.aio.Channel:
        if self._watched is None:
            return grpc.aio.insecure_channel(self._address, options=self._options)
        self._credentials = self._watched.current()
        return grpc.aio.secure_channel(self._address, self._credentials, options=self._options)

    def _current(self) -> grpc.aio.Channel:
        if self._watched is not None and self._watched.current() is not self._credentials:
            task = asyncio.ensure_future(self._open.close(_UNTIL_CALLS_END_S))
            self._closing[task] = self._open
            task.add_done_callback(self._closing.pop)
            self._open = self._channel()
        return self._open

    def _metadata(self) -> Metadata:
        if self._tokens is None:
            return ()
        return (("authorization", f"Bearer {self._tokens.current()[0]}"),)

    def _calls(self, kind: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The starter of one method's calls, on the channel of the moment."""

        def call(*positional: Any, metadata: Metadata = (), **terms: Any) -> Any:
            start = getattr(self._current(), kind)(*arguments, **named)
            return start(*positional, metadata=(*metadata, *self._metadata()), **terms)

        return call

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        return self._calls("unary_unary", arguments, named)

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        return self._calls("unary_stream", arguments, named)

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        return self._calls("stream_unary", arguments, named)

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        return self._calls("stream_stream", arguments, named)

    async def close(self, grace: float | None = None) -> None:
        """Ends all calls, those on earlier certificates, too."""
        earlier = dict(self._closing)
        for task in earlier:
            task.cancel()
        await asyncio.gather(*earlier, return_exceptions=True)
        for channel in (*earlier.values(), self._open):
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
