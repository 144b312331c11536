"""Sends bodies to the gateway over HTTP/1.1 and judges the answers."""

import asyncio
import json
import random
from contextlib import suppress

from tests.e2e.fuzz.case import Case, CaseVerdict
from tests.e2e.fuzz.json_bodies import TARGET, Bodies

LEAVE_S = 3.0  # a request without any answer is left: it may generate for minutes
CUT_S = 0.2  # a stream that goes on is left after so long
REFUSED = range(400, 500)
# Codes of refusals that concern no field of the body.
NAMELESS = frozenset({"overloaded", "request_too_large", "not_found", "cancelled"})


class HttpTarget:
    """One connection per case: what a case does to its connection concerns no other."""

    name = TARGET

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._bodies = Bodies()

    def draw(self, rng: random.Random) -> Case:
        """A case of this target."""
        return self._bodies.draw(rng)

    async def run(self, case: Case) -> CaseVerdict:
        """Sends the case and judges its answer."""
        head = (
            f"POST {case.name} HTTP/1.1\r\nhost: fuzz\r\ncontent-type: application/json\r\n"
            f"content-length: {len(case.payload)}\r\nconnection: close\r\n\r\n"
        )
        try:
            answer = await exchange(self._address, head.encode() + case.payload)
        except TimeoutError:
            return CaseVerdict("left")
        except OSError as error:
            return CaseVerdict(type(error).__name__, "no answer", was_lost=True)
        return judge(answer)

    async def close(self) -> None:
        """Nothing is open."""


async def exchange(address: tuple[str, int], sent: bytes) -> bytes:
    """All of a refusal; of what may be a stream, what comes within CUT_S after its beginning."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(sent)
        async with asyncio.timeout(LEAVE_S):
            answer = await reader.read(1 << 16)
        is_stream = answer.startswith(b"HTTP/1.1 200")
        with suppress(TimeoutError):
            async with asyncio.timeout(CUT_S if is_stream else LEAVE_S):
                while more := await reader.read(1 << 16):
                    answer += more
        return answer
    finally:
        writer.close()


def judge(answer: bytes) -> CaseVerdict:
    """The verdict on an HTTP answer to a body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    parts = head.split(b" ", 2)
    if len(parts) < 3 or not parts[1].isdigit():
        return CaseVerdict("closed", "the connection was closed without an answer", was_lost=True)
    status = int(parts[1])
    if status == 500 or b'"internal_error"' in body:
        return CaseVerdict(str(status), f"internal error: {body[-300:]!r}")
    if status not in REFUSED:
        return CaseVerdict(str(status))
    try:
        error = json.loads(body)["error"]
        is_named = bool(error["param"]) or error["code"] in NAMELESS
        is_named = is_named or "not valid JSON" in error["message"]
        # Five fields together leave no token; `param` has room for one, the sentence names all.
        is_named = is_named or "grammar, min_tokens, allowed_token_ids" in error["message"]
    except (ValueError, LookupError, TypeError):
        return CaseVerdict(str(status), f"a refusal of another form: {body[:300]!r}")
    return CaseVerdict(str(status), "" if is_named else f"names no field: {error['message'][:200]}")
