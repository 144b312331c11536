"""Streams whose first message takes long begin without it: proxies wait only so long for a head."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from gateway.grpc_api.statuses import Context
from gateway.request.generation import OutputDelta


async def with_early_head(
    deltas: AsyncGenerator[OutputDelta, None], context: Context, interval_s: float
) -> AsyncGenerator[OutputDelta, None]:
    """The deltas; the call's initial metadata precede the first one if that takes long.

    A status that comes later is no less one: gRPC sends it after all messages. Use aclosing().
    """
    async with aclosing(deltas):
        first = asyncio.create_task(_first(deltas))
        try:
            await asyncio.wait((first,), timeout=interval_s or None)
            if not first.done():
                await context.send_initial_metadata(())
            yield await first
        finally:
            first.cancel()
            await asyncio.wait((first,))  # what runs cannot be closed
        async for delta in deltas:
            yield delta


async def _first(deltas: AsyncGenerator[OutputDelta, None]) -> OutputDelta:
    return await anext(deltas)
