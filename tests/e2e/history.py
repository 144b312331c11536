"""Compares a client's view of a stream with that of an undisturbed one.

The result is a list of sentences, each naming a fault and its position. An empty list means that
the disturbance could not be noticed, except for the time it took.
"""

from dataclasses import dataclass, field

from pagewire.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class Piece:
    """One message of a stream."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[float, ...] = ()
    finish_reason: int = types_pb2.FINISH_REASON_UNSPECIFIED
    completion_tokens: int | None = None  # of its usage, if it has one
    stop_string: str = ""


@dataclass(slots=True)
class History:
    """All messages of a stream in the order of arrival, and its error if it broke."""

    pieces: list[Piece] = field(default_factory=list)
    error: str = ""

    @property
    def token_ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.token_ids]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def logprobs(self) -> list[float]:
        return [logprob for piece in self.pieces for logprob in piece.logprobs]

    @property
    def ends(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.finish_reason]


def judge(seen: History, calm: History) -> list[str]:
    """The faults of a history; `calm` is the history of the same request, undisturbed."""
    faults = [f"the stream broke off: {seen.error}"] if seen.error else []
    faults += _judge_ends(seen, calm)
    difference = _difference(seen.token_ids, calm.token_ids)
    if difference:
        faults.append(difference)
    elif seen.text != calm.text:
        faults.append(f"the tokens are right, but the text is {seen.text!r}, not {calm.text!r}")
    elif not _are_close(seen.logprobs, calm.logprobs):
        faults.append(f"the tokens are right, but {_first_logprob(seen.logprobs, calm.logprobs)}")
    return faults


def _judge_ends(seen: History, calm: History) -> list[str]:
    if len(seen.ends) != 1:
        return [f"it ended {len(seen.ends)} times"]
    faults = []
    if not seen.pieces[-1].finish_reason:
        after = seen.pieces[seen.pieces.index(seen.ends[0]) + 1 :]
        faults.append(f"{len(after)} messages came after the end")
    end, expected = seen.ends[0], calm.ends[0]
    if (end.finish_reason, end.stop_string) != (expected.finish_reason, expected.stop_string):
        reason = types_pb2.FinishReason.Name(end.finish_reason)
        wanted = types_pb2.FinishReason.Name(expected.finish_reason)
        faults.append(f"it ended for {reason} {end.stop_string!r}, not for {wanted}")
    if end.completion_tokens != expected.completion_tokens:
        faults.append(
            f"its usage counts {end.completion_tokens} tokens, not {expected.completion_tokens}"
        )
    return faults


def _difference(seen: list[int], calm: list[int]) -> str | None:
    """The first position at which tokens differ, and how; None if they are equal."""
    at = next(
        (i for i, (a, b) in enumerate(zip(seen, calm, strict=False)) if a != b),
        min(len(seen), len(calm)),
    )
    if seen == calm:
        return None
    rest, expected = seen[at:], calm[at:]
    for count in range(1, max(len(seen), len(calm)) + 1):
        if count <= len(expected) and rest == expected[count:]:
            return f"{count} tokens are lost at position {at}"
        if count <= at and rest[:count] == calm[at - count : at] and rest[count:] == expected:
            return f"{count} tokens are repeated at position {at}"
    if sorted(rest) == sorted(expected):
        return f"the tokens from position {at} on came in another order"
    if len(rest) > len(expected) and rest[: len(expected)] == expected:
        return f"{len(rest) - len(expected)} tokens too many from position {at} on"
    got, wanted = (str(tokens[0]) if tokens else "nothing" for tokens in (rest, expected))
    return f"the token at position {at} is {got}, not {wanted}"


def _are_close(seen: list[float], calm: list[float], tolerance: float = 1e-3) -> bool:
    return len(seen) == len(calm) and all(
        abs(a - b) <= tolerance for a, b in zip(seen, calm, strict=True)
    )


def _first_logprob(seen: list[float], calm: list[float]) -> str:
    if len(seen) != len(calm):
        return f"{len(seen)} log probabilities came, not {len(calm)}"
    at = next(
        i for i, (a, b) in enumerate(zip(seen, calm, strict=True)) if not _are_close([a], [b])
    )
    return f"the log probability at position {at} is {seen[at]}, not {calm[at]}"
