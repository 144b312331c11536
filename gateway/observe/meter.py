"""Counts requests while they pass: one call per message, a few hundred nanoseconds each."""

from gateway.observe import declared
from gateway.observe.declared import OTHER, ROUTES, STATUSES
from gateway.request.choices import is_first_choice
from gateway.request.generation import Finish, GenerationRequest, OutputTimings
from wire.metrics.book import Book, Buckets, Row


class RequestMetrics:
    """The cells of requests, of one process."""

    def __init__(self, book: Book, row: Row) -> None:
        at = book.at
        self.row = row
        self.outcomes = book.cells(declared.REQUESTS)
        self.prompt_tokens_at = at(declared.PROMPT_TOKENS)
        self.cached_tokens_at = at(declared.CACHED_TOKENS)
        self.output_tokens_at = at(declared.OUTPUT_TOKENS)
        self._losses_at = at(declared.LOSSES)
        self._running_at, self._waiting_at = at(declared.RUNNING), at(declared.WAITING)
        self.ttft, self.itl = self._buckets(book, declared.TTFT), self._buckets(book, declared.ITL)
        self.tpot, self.e2e = self._buckets(book, declared.TPOT), self._buckets(book, declared.E2E)
        self.queue = self._buckets(book, declared.QUEUE)
        self.prefill = self._buckets(book, declared.PREFILL)
        self.decode = self._buckets(book, declared.DECODE)
        self.inference = self._buckets(book, declared.INFERENCE)
        self.prompt_sizes = self._buckets(book, declared.REQUEST_PROMPT_TOKENS)
        self.output_sizes = self._buckets(book, declared.REQUEST_OUTPUT_TOKENS)
        self._http = {
            (route, status): at(declared.HTTP, route, status)
            for route in (*ROUTES, OTHER)
            for status in (*STATUSES, OTHER)
        }

    def _buckets(self, book: Book, name: str) -> Buckets:
        return book.buckets(self.row, name)

    @classmethod
    def unread(cls) -> "RequestMetrics":
        """The meter of a process whose metrics are not read."""
        book = Book((*declared.OWN, declared.HTTP_RESPONSES))
        return cls(book, book.new_row())

    def now(self, num_running: int, num_waiting: int) -> None:
        """Notes how many requests there are."""
        self.row[self._running_at], self.row[self._waiting_at] = num_running, num_waiting

    def lost_scheduler(self) -> None:
        """Counts a broken stream."""
        self.row[self._losses_at] += 1

    def answered(self, path: str, status: int) -> None:
        """Counts an answer over HTTP."""
        route = path if path in ROUTES else OTHER
        if path.startswith("/v1/models/"):
            route = "/v1/models"
        code = str(status)
        self.row[self._http[route, code if code in STATUSES else OTHER]] += 1


class OutputMeter:
    """One output, from its arrival to its end."""

    __slots__ = ("_began_s", "_first_s", "_is_over", "_last_s", "_metrics", "_num_output", "_owns")

    def __init__(self, metrics: RequestMetrics, request: GenerationRequest, now_s: float) -> None:
        self._metrics = metrics
        self._began_s = self._last_s = now_s
        self._first_s: float | None = None
        self._num_output = 0
        self._is_over = False
        # Usage counts a prompt once for all outputs that share it.
        self._owns = is_first_choice(request)

    @property
    def began_s(self) -> float:
        """When the output arrived."""
        return self._began_s

    def admitted(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Counts the prompt, once: it is computed, and how much of it was cached is known."""
        if self._owns:
            self._owns = False
            row = self._metrics.row
            row[self._metrics.prompt_tokens_at] += num_prompt_tokens
            row[self._metrics.cached_tokens_at] += num_cached_tokens

    def received(self, num_tokens: int, now_s: float) -> None:
        """Counts a message's tokens; call it before they are passed on."""
        metrics = self._metrics
        metrics.row[metrics.output_tokens_at] += num_tokens
        self._num_output += num_tokens
        if self._first_s is None:
            self._first_s = now_s
            metrics.ttft.observe(now_s - self._began_s)
        else:
            metrics.itl.observe(now_s - self._last_s)
        self._last_s = now_s

    def finished(
        self,
        finish: Finish,
        now_s: float,
        submitted_s: float | None = None,
        admitted_s: float | None = None,
    ) -> None:
        """Counts the end; call it before it is passed on."""
        metrics = self._metrics
        self.admitted(finish.usage.num_prompt_tokens, finish.usage.num_cached_tokens)
        self._end(finish.reason.value, now_s)
        metrics.prompt_sizes.observe(finish.usage.num_prompt_tokens)
        metrics.output_sizes.observe(finish.usage.num_completion_tokens)
        if self._per_token_s is not None:
            metrics.tpot.observe(self._per_token_s)
        if submitted_s is not None and admitted_s is not None:
            self._computed(submitted_s, admitted_s, now_s)

    def _computed(self, submitted_s: float, admitted_s: float, now_s: float) -> None:
        """Counts where the time of an output went."""
        metrics = self._metrics
        metrics.queue.observe(admitted_s - submitted_s)
        metrics.inference.observe(now_s - admitted_s)
        if self._first_s is not None:
            metrics.prefill.observe(self._first_s - admitted_s)
            metrics.decode.observe(now_s - self._first_s)

    def timings(self, queue_s: float | None, now_s: float) -> OutputTimings:
        """The parts of the output's time so far."""
        if self._first_s is None:
            return OutputTimings(now_s - self._began_s, queue_s)
        return OutputTimings(
            now_s - self._began_s, queue_s, self._first_s - self._began_s, self._per_token_s
        )

    @property
    def _per_token_s(self) -> float | None:
        if self._first_s is None or self._num_output < 2:
            return None
        return (self._last_s - self._first_s) / (self._num_output - 1)

    def failed(self, error_code: str, now_s: float) -> None:
        """Counts an end without a finish: a refusal, a failure, or a client that left.

        Has no effect after the end.
        """
        self._end(error_code, now_s)

    def _end(self, outcome: str, now_s: float) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._metrics.row[self._metrics.outcomes[outcome]] += 1
        self._metrics.e2e.observe(now_s - self._began_s)
