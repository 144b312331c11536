"""Creates a core and, if configured, its recording."""

import logging
import os
import platform
import re
import time
from dataclasses import dataclass

import numpy as np

from pagewire import __version__
from pagewire.v1 import worker_pb2
from pagewire.v1.journal_pb2 import JournalHeader
from scheduler_svc.core import Scheduler, SchedulerConfig
from scheduler_svc.journal import segments, values
from scheduler_svc.journal.calls import TappedScheduler
from scheduler_svc.journal.mask import KEY_BYTES, Mask
from scheduler_svc.journal.options import RecordOptions
from scheduler_svc.journal.recorder import Recorder, RecordingLimits
from scheduler_svc.journal.recording import FORMAT_VERSION, core_sha256

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Made:
    """A core and its recorder, if it has one."""

    core: Scheduler
    recorder: Recorder | None = None


def make_core(
    config: SchedulerConfig,
    worker: worker_pb2.WorkerDescription,
    address: str,
    options: RecordOptions | None,
) -> Made:
    """Creates a core. If its recording cannot start, logs an error and records nothing."""
    if options is None:
        return Made(Scheduler(config))
    try:
        recorder = _begin(config, worker, address, options)
    except OSError as error:
        logger.error("nothing is recorded: %s", error)
        return Made(Scheduler(config))
    logger.info("recording to %s", recorder.folder)
    return Made(TappedScheduler(config, recorder.tap), recorder)


def _begin(
    config: SchedulerConfig,
    worker: worker_pb2.WorkerDescription,
    address: str,
    options: RecordOptions,
) -> Recorder:
    max_bytes = options.max_mib * segments.MIB
    options.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for pruned in segments.prune(options.folder, max_bytes):
        logger.info("the recording %s had to make room", pruned)
    mask = None
    if not options.keeps_prompts:
        mask = Mask(config.vocab_size, config.max_num_seqs, os.urandom(KEY_BYTES))
    header = JournalHeader(
        format_version=FORMAT_VERSION,
        started_s=time.time(),
        versions=[
            f"pagewire {__version__}",
            f"python {platform.python_version()}",
            f"numpy {np.__version__}",
        ],
        core_sha256=core_sha256(),
        config=values.encode(config if mask is None else mask.config(config)),
        worker=worker,
        worker_address=address,
        prompts_replaced=mask is not None,
    )
    return Recorder(options.folder / _name(address), header, mask, RecordingLimits(max_bytes))


def _name(address: str) -> str:
    """A folder name that sorts by time and is unique to process and worker."""
    began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return f"{began}-{os.getpid()}-{re.sub(r'[^0-9A-Za-z.]+', '_', address)}"
