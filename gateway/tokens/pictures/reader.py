"""Makes pictures ready for a model: fetched, read in another process, and told apart by content."""

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

from gateway.callers.auth import CLIENT
from gateway.callers.lanes import Lane
from gateway.callers.picture_limits import PictureLimits
from gateway.chat.pictures import PictureSource
from gateway.errors.request_errors import invalid, unavailable
from gateway.tokens.pictures.answers import ProcessedPicture, UnreadPicture, unpack_answer
from gateway.tokens.pictures.fetch import BadUrl, Fetcher
from gateway.tokens.pictures.settings import PictureSettings
from wire.forks import frames
from wire.forks.limits import CheckLimits
from wire.forks.process import HelperProcess, NoStart

NUM_THREADS = 2  # that fetch, and wait for the other process
CONTENT_ID_BYTES = 16
MAX_REQUEST_BYTES = 40 << 20  # of the pixels of a request's pictures: a message has room for them
LIMITS = CheckLimits(cpu_s=10, wall_s=120.0, memory_mib=768, what="the picture")
_TRIES = 2  # a process that was lost, not by a picture, is replaced


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """A picture as it goes to the worker."""

    content_id: bytes
    pixels: ProcessedPicture
    settings: PictureSettings

    @property
    def num_tokens(self) -> int:
        """Tokens that stand for it in a prompt."""
        return self.pixels.num_tokens


class PictureReader:
    """Reads the pictures of requests to one model."""

    def __init__(
        self,
        settings: PictureSettings,
        limits: PictureLimits | None = None,
        domains: Sequence[str] = (),
        work_limits: CheckLimits = LIMITS,
        fetcher: Fetcher | None = None,
    ) -> None:
        self.settings = settings
        self._limits = limits or PictureLimits()
        self._fetcher = fetcher or Fetcher(frozenset(domains), self._limits.max_bytes)
        self._work_limits = work_limits
        self._lane = Lane("pictures", NUM_THREADS)
        self._lock = threading.Lock()
        self._process: HelperProcess | None = None

    def close(self) -> None:
        """Ends the other process."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    async def prepare(self, sources: Sequence[PictureSource]) -> list[PreparedPicture]:
        """The pictures, in order. Raises RequestError naming the one at fault."""
        most = self._limits.max_pictures
        if len(sources) > most:
            problem = f"the request has {len(sources)} pictures, --max-pictures is {most}"
            raise invalid(sources[most].place, problem)
        prepared, num_bytes = [], 0
        for source in sources:
            one = await self._lane.run(CLIENT.get(), partial(self._prepare, source))
            num_bytes += len(one.pixels.values)
            if num_bytes > MAX_REQUEST_BYTES:
                problem = f"pictures of more than {MAX_REQUEST_BYTES >> 20} MiB of pixels in all"
                raise invalid(source.place, problem)
            prepared.append(one)
        return prepared

    def _prepare(self, source: PictureSource) -> PreparedPicture:
        try:
            content = source.content or self._fetcher.content(source.url)
            if len(content) > self._limits.max_bytes:
                mib = self._limits.max_bytes >> 20
                raise UnreadPicture(f"the file has more than {mib} MiB, --max-picture-mib")
            pixels = self._read(content)
        except (BadUrl, UnreadPicture) as error:
            raise invalid(source.place, f"the picture is not read: {error}") from None
        told = hashlib.blake2b(repr(pixels.grid).encode(), digest_size=CONTENT_ID_BYTES)
        told.update(pixels.values)
        return PreparedPicture(told.digest(), pixels, self.settings)

    def _read(self, content: bytes) -> ProcessedPicture:
        """The pixels of a file, by a child of the other process. Raises UnreadPicture."""
        for _ in range(_TRIES):
            try:
                process = self._started()
                with process.connect() as ask:
                    return unpack_answer(ask(content))
            except (frames.Closed, NoStart, OSError):
                self.close()
        raise unavailable("pictures cannot be read: the process that does it ends by itself")

    def _started(self) -> HelperProcess:
        with self._lock:
            if self._process is None:
                settings = asdict(self.settings) | {"form": self.settings.form.value}
                given = {
                    "settings": settings,
                    "max_pixels": self._limits.max_pixels,
                    "limits": asdict(self._work_limits),
                }
                self._process = HelperProcess("gateway.tokens.pictures.helper", given)
            return self._process
