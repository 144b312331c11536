"""The reader of pictures of a gateway whose model takes some, where Pillow is installed."""

import logging
from importlib.util import find_spec

from gateway.process.config import GatewayConfig
from gateway.tokens.pictures.reader import PictureReader
from gateway.tokens.pictures.settings import UnservedPictures, read_settings

log = logging.getLogger("gateway.process.pictures")


def picture_reader(config: GatewayConfig) -> PictureReader | None:
    """The reader of pictures; None, and a line in the log, where the model's are not served."""
    try:
        settings = read_settings(config.model)
        if settings is None:
            return None
        if find_spec("PIL") is None:
            raise UnservedPictures("Pillow is not installed: pip install 'pagewire[vision]'")
    except UnservedPictures as error:
        log.info("pictures are refused: %s", error)
        return None
    return PictureReader(settings, config.edge.pictures, config.allowed_media_domains)
