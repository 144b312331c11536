"""`python -m gateway`: one gateway until SIGTERM."""

import logging
import sys

import uvloop

from gateway.chat.answer import NoUseForParser
from gateway.config import parse_args
from gateway.server import serve
from gateway.tokenizer import Tokenizer, TokenizerFolderError
from rpc.server import PortInUse


def main() -> int:
    """Returns the exit code: 0 after a wanted end, 1 when it could not start."""
    config = parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        uvloop.run(serve(config, Tokenizer.from_folder(config.model)))
    except (NoUseForParser, PortInUse, TokenizerFolderError) as error:
        logging.getLogger("gateway").error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
