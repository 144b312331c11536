"""The page's files, read once, and their headers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing but this server's own files, none of them inline; and no string becomes markup.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Asked for each time, and not sent again while it is the same: an upgrade shows at once, and
    # its files fit each other.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is answered."""

    body: bytes = field(repr=False)
    media_type: str
    etag: str

    def is_known(self, if_none_match: str) -> bool:
        """True if a client that sends this header has it already."""
        tags = (tag.strip().removeprefix("W/") for tag in if_none_match.split(","))
        return any(tag in (self.etag, "*") for tag in tags)


def page_files() -> dict[str, PageFile]:
    """All files, by name."""
    return dict(_read())


def _read() -> Iterator[tuple[str, PageFile]]:
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in MEDIA_TYPES:
            body = path.read_bytes()
            etag = f'"{blake2b(body, digest_size=12).hexdigest()}"'
            yield path.name, PageFile(body, MEDIA_TYPES[path.suffix], etag)
