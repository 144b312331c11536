"""Headers that are a caller's trace."""

import pytest

from wire.tracing.context import MAX_STATE_CHARS, context_of, read_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("given", "is_sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # another flag of a later level
        (f" 00-{TRACE}-{SPAN}-01 ", True),
        (f"cc-{TRACE}-{SPAN}-01", True),  # a later version is read as far as it is known
        (f"cc-{TRACE}-{SPAN}-01-what-comes", True),
    ],
)
def test_a_valid_one_is_read(given: str, is_sampled: bool) -> None:
    found = read_context(given)
    assert found is not None
    assert (found.trace_id, found.span_id, found.is_sampled) == (TRACE, SPAN, is_sampled)
    assert found.traceparent.startswith("00-")
    assert read_context(found.traceparent) == found


@pytest.mark.parametrize(
    "given",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\nx-evil: 1",
        "٣" * 55,
    ],
)
def test_an_invalid_one_counts_as_absent(given: str) -> None:
    assert read_context(given) is None


@pytest.mark.parametrize("state", ["k=\nv", "k=é", "k=" + "v" * MAX_STATE_CHARS])
def test_a_state_that_no_header_can_carry_is_left_out(state: str) -> None:
    found = read_context(f"00-{TRACE}-{SPAN}-01", state)
    assert found is not None and found.tracestate == ""


def test_headers_are_found_by_name() -> None:
    parent = f"00-{TRACE}-{SPAN}-01"
    found = context_of({"traceparent": parent, "tracestate": "a=1,b=2"})
    assert found is not None and (found.traceparent, found.tracestate) == (parent, "a=1,b=2")
    assert context_of({"tracestate": "a=1"}) is None
