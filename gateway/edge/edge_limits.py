"""The options that bound what a client may cost, with their defaults. Every refusal names one."""

import argparse
import math
from dataclasses import dataclass, fields
from typing import Any

from gateway.callers.grammar_budgets import DEFAULT_LIMITS as DEFAULT_GRAMMAR_LIMITS
from gateway.callers.grammar_budgets import GrammarLimits
from gateway.callers.picture_limits import PictureLimits
from gateway.callers.text_turns import DEFAULT_LIMITS, MIB, TextLimits
from gateway.errors import limits

MAY_BE_ZERO = frozenset({"max_connection_age_s", "sse_keep_alive_interval"})
WIDEST = 4  # bytes in memory of each byte of a body, where a character of its texts is wide


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """Limits of clients and connections; of each gateway process where there are several.

    Raises ValueError, naming the option, for a value that cannot work.
    """

    max_body_mib: int = limits.MAX_BODY_BYTES // MIB
    max_tokenize_mib: int = DEFAULT_LIMITS.max_text // MIB
    max_tokenizing_mib: int = DEFAULT_LIMITS.max_total // MIB
    max_tokenizing_mib_per_client: int = DEFAULT_LIMITS.max_per_client // MIB
    max_body_values: int = 1 << 18
    max_bodies_mib: int = 512
    max_bodies_mib_per_client: int = 256
    max_slow_grammars: int = DEFAULT_GRAMMAR_LIMITS.max_slow
    max_slow_grammars_per_client: int = DEFAULT_GRAMMAR_LIMITS.max_slow_per_client
    max_pictures: int = PictureLimits().max_pictures
    max_picture_mib: int = PictureLimits().max_bytes // MIB
    max_picture_pixels: int = PictureLimits().max_pixels
    max_header_bytes: int = 64 << 10
    max_headers: int = 128
    max_streams_per_client: int = 1024
    max_connections: int = 8192
    header_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    keep_alive_s: float = 75.0
    max_connection_idle_s: float = 600.0
    max_connection_age_s: float = 0.0  # 0: no limit
    sse_keep_alive_interval: float = 15.0  # seconds; 0: never

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name in MAY_BE_ZERO
            if not (0 < value < math.inf or (may_be_zero and value == 0)):
                option = f"--{field.name.replace('_', '-')}"
                raise ValueError(f"{option}: {value} is not a positive number")

    @property
    def max_body_bytes(self) -> int:
        """Most bytes of an HTTP body, and of a gRPC message after decompression."""
        return self.max_body_mib * MIB

    @property
    def texts(self) -> TextLimits:
        """The limits of texts that are tokenized."""
        return TextLimits(
            max_text=self.max_tokenize_mib * MIB,
            max_total=self.max_tokenizing_mib * MIB,
            max_per_client=self.max_tokenizing_mib_per_client * MIB,
        )

    @property
    def max_bodies_bytes_per_client(self) -> int:
        """The limit of a client's bodies that are received or read. One always fits, all wide."""
        return max(self.max_bodies_mib_per_client * MIB, WIDEST * self.max_body_bytes)

    @property
    def max_bodies_bytes(self) -> int:
        """The same of all clients."""
        return max(self.max_bodies_mib * MIB, self.max_bodies_bytes_per_client)

    @property
    def grammars(self) -> GrammarLimits:
        """The limits of grammars that take long to be checked."""
        return GrammarLimits(self.max_slow_grammars, self.max_slow_grammars_per_client)

    @property
    def pictures(self) -> PictureLimits:
        """The limits of pictures."""
        max_bytes = self.max_picture_mib * MIB
        return PictureLimits(self.max_pictures, max_bytes, self.max_picture_pixels)

    @property
    def grpc_options(self) -> list[tuple[str, int]]:
        """The limits that gRPC itself enforces."""
        options = [
            ("grpc.max_receive_message_length", self.max_body_bytes),
            ("grpc.max_metadata_size", self.max_header_bytes),
            ("grpc.max_concurrent_streams", self.max_streams_per_client),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_connection_idle_ms", round(self.max_connection_idle_s * 1e3)),
        ]
        if self.max_connection_age_s:
            # Without a grace period: streams end by themselves, however long they take.
            options.append(("grpc.max_connection_age_ms", round(self.max_connection_age_s * 1e3)))
        return options


HELP: dict[str, tuple[str, str]] = {
    "max_body_mib": ("MIB", "most MiB of an HTTP body (413) or gRPC message"),
    "max_tokenize_mib": (
        "MIB",
        "most MiB of a text that is tokenized at once (413); a prompt may have 16 bytes per token "
        "of the model's length, if that is more",
    ),
    "max_tokenizing_mib": ("MIB", "MiB of all texts that wait to be tokenized (429)"),
    "max_tokenizing_mib_per_client": ("MIB", "those of one client (429)"),
    "max_body_values": (
        "N",
        "most commas, colons and opening brackets of an HTTP body outside of texts, in addition "
        "to the model's maximum length (413)",
    ),
    "max_bodies_mib": ("MIB", "MiB of memory for bodies that are received or read (429)"),
    "max_bodies_mib_per_client": ("MIB", "the same of each client (429)"),
    "max_slow_grammars": ("N", "different grammars whose check takes long that may wait (429)"),
    "max_slow_grammars_per_client": ("N", "of these, those of one client (429)"),
    "max_pictures": ("N", "most pictures of a request (400)"),
    "max_picture_mib": ("MIB", "most MiB of a picture's file (400)"),
    "max_picture_pixels": ("N", "most pixels of a picture, known before it is decoded (400)"),
    "max_header_bytes": ("N", "most bytes of a request's headers (431)"),
    "max_headers": ("N", "most headers of an HTTP request (431)"),
    "max_streams_per_client": (
        "N",
        "most requests that a client has open at once (429); a client is an API key or, where "
        "none is needed, an address",
    ),
    "max_connections": ("N", "most connections of each port; more are closed"),
    "header_timeout_s": ("S", "seconds for the headers of an HTTP request (408)"),
    "body_timeout_s": ("S", "seconds for an HTTP body (408), and one more per 64 KiB received"),
    "write_timeout_s": ("S", "seconds after which a client that does not read its answer is left"),
    "keep_alive_s": ("S", "seconds that an HTTP connection may be idle between two requests"),
    "max_connection_idle_s": ("S", "seconds that a gRPC connection may be without a call"),
    "max_connection_age_s": (
        "S",
        "seconds after which a gRPC client is asked to connect anew, calls end first; 0 is never",
    ),
    "sse_keep_alive_interval": (
        "S",
        "seconds without an event after which a stream says that it waits, before its first event, "
        "too; 0 is never",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one option per limit."""
    group = parser.add_argument_group("limits of clients")
    for field in fields(EdgeLimits):
        metavar, text = HELP[field.name]
        option = f"--{field.name.replace('_', '-')}"
        kind = type(field.default)
        group.add_argument(option, type=kind, default=field.default, metavar=metavar, help=text)


def take(options: dict[str, Any]) -> EdgeLimits:
    """Removes these options from parsed ones. Raises ValueError, naming the option."""
    return EdgeLimits(**{field.name: options.pop(field.name) for field in fields(EdgeLimits)})
