"""The routes of the page: `/` and its files."""

from fastapi import FastAPI, Request
from fastapi.responses import Response

from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.page.files import HEADERS, INDEX, PageFile, page_files

PREFIX = "/page/"


def is_page_path(path: str) -> bool:
    """True if a path is the page's: the same for all callers, and needs no key."""
    return path == "/" or path.startswith(PREFIX)


def add_page_routes(app: FastAPI) -> None:
    """Adds the page."""
    files = page_files()

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return _answer(files[INDEX], request)

    @app.get(PREFIX + "{name}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        if name not in files:
            raise RequestError(ErrorKind.NOT_FOUND, "the page has no file of this name")
        return _answer(files[name], request)


def _answer(file: PageFile, request: Request) -> Response:
    headers = HEADERS | {"etag": file.etag}
    if file.is_known(request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)
