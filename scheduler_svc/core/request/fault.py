"""Names the request that was at work when an exception was raised."""

from types import TracebackType


class RequestFault(Exception):
    """Raised in place of an exception at work on one request, or on few; its cause says what."""

    def __init__(self, *request_ids: str) -> None:
        super().__init__(f"an exception at work on {', '.join(request_ids)}")
        self.request_ids = request_ids


class blaming:
    """Context manager: exceptions inside name the request."""

    __slots__ = ("_request_id",)

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, RequestFault):
            raise RequestFault(self._request_id) from error
