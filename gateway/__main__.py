"""`python -m gateway`: runs one gateway, or several on shared ports, until SIGTERM."""

import logging
import signal
import sys
import time
from functools import partial

import uvloop

from gateway.chat.answer import NoUseForParser
from gateway.chat.formats import BadPlugin
from gateway.process.config import parse_args
from gateway.process.server import serve
from gateway.process.supervisor import supervise
from gateway.request.sampling_defaults import BadGenerationConfig
from gateway.tokens.text_contents import CannotRename
from gateway.tokens.tokenizer import Tokenizer, TokenizerFolderError
from pagewire.gguf.header import BadGguf
from pagewire.hub.download import ModelUnavailable
from pagewire.settings import home
from wire.aio.loop import GrpcLoop
from wire.identity.watched import BadIdentityFile
from wire.logs.setup import set_up_logging
from wire.processes import die_with_parent
from wire.server import PortInUse
from wire.tracing.opener import NoTracing

COULD_NOT_START = (
    BadGguf,
    BadGenerationConfig,
    BadIdentityFile,
    CannotRename,
    NoUseForParser,
    BadPlugin,
    NoTracing,
    PortInUse,
    TokenizerFolderError,
)


def main() -> int:
    """Returns the exit code: 0 after a requested stop, 1 when it could not start."""
    home.settle()
    start_s = time.process_time()
    try:
        config = parse_args(own_start_s=start_s, on_logs=partial(set_up_logging, service="gateway"))
        if config.processes > 1:
            return uvloop.run(supervise(config, sys.argv[1:]))
        if config.share_ports:
            die_with_parent(signal.SIGTERM)
        tokenizer = Tokenizer.from_folder(config.model, config.chat_template)
        uvloop.run(serve(config, tokenizer), loop_factory=GrpcLoop)
    except ModelUnavailable as error:
        logging.getLogger("gateway").error("--model: %s", error)
        return 1
    except COULD_NOT_START as error:
        logging.getLogger("gateway").error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
