"""Counts steps that were computed: some additions per step, on the thread that answers them."""

from wire.metrics.book import Book
from wire.metrics.declared import SECONDS, counter, histogram
from worker_svc.protocol.step import StepTimings

DECODE, PREFILL, MIXED, RELEASE = "decode", "prefill", "mixed", "release"
KINDS = (DECODE, PREFILL, MIXED, RELEASE)
STEP_SECONDS = (
    *(0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075),
    *(bound for bound in SECONDS if bound >= 0.01),
)

_P = "pagewire_worker_"
STEPS, STEP_TOKENS = _P + "step_seconds", _P + "step_tokens_total"
FAILED = _P + "failed_steps_total"
BUSY, IDLE = _P + "device_busy_seconds_total", _P + "device_idle_seconds_total"

OWN = (
    histogram(STEPS, "Seconds from a step's launch to its answer.", "kind", KINDS, STEP_SECONDS),
    counter(STEP_TOKENS, "Tokens that steps computed.", "kind", KINDS),
    counter(FAILED, "Steps that ended with an error, without a trace of them."),
    counter(BUSY, "Seconds in which the device computed steps.", "kind", KINDS),
    counter(IDLE, "Seconds in which it had nothing to do before a step.", "kind", KINDS),
)


def kind_of(num_rows: int, num_decode_rows: int) -> str:
    """The kind of a step with so many rows, of which so many decode."""
    if not num_rows:
        return RELEASE
    if num_decode_rows == num_rows:
        return DECODE
    return MIXED if num_decode_rows else PREFILL


class StepCounts:
    """The cells of this process. Belongs to the thread that answers steps."""

    def __init__(self) -> None:
        self.book = Book(OWN)
        self.row = self.book.new_row()
        book, row = self.book, self.row
        self._steps = {kind: book.buckets(row, STEPS, kind) for kind in KINDS}
        self._tokens, self._failed_at = book.cells(STEP_TOKENS), book.at(FAILED)
        self._busy, self._idle = book.cells(BUSY), book.cells(IDLE)

    def computed(self, kind: str, num_tokens: int, duration_us: int, timings: StepTimings) -> None:
        """Counts a step that was answered with its results."""
        self._steps[kind].observe(duration_us / 1e6)
        self.row[self._tokens[kind]] += num_tokens
        self.row[self._busy[kind]] += timings.busy_us / 1e6
        self.row[self._idle[kind]] += timings.idle_us / 1e6

    def failed(self) -> None:
        """Counts a step that was answered with an error."""
        self.row[self._failed_at] += 1
