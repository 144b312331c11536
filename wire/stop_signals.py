"""Stop signals of an asyncio service: the first asks it to drain, the second to end at once."""

import asyncio
import signal


def stop_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Two events of the running loop, set by the first signal and by the second."""
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return first, second
