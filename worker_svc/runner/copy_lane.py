"""Copies of blocks apart from the steps: on CUDA they run on a stream of their own."""

from collections import deque

import torch

from worker_svc.device.transfer import wait_for
from worker_svc.protocol.step import StepMoves
from worker_svc.runner.block_mover import BlockMover


class CopyLane:
    """Copies in order, of one thread: the next one is launched while one is under way."""

    def __init__(self, mover: BlockMover, device: torch.device) -> None:
        self._mover = mover
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._under_way: deque[torch.cuda.Event] = deque()

    @torch.inference_mode()
    def copy(self, moves: StepMoves) -> None:
        """Launches copies; returns when those launched before are done."""
        if self._stream is None:
            self._mover.apply(moves)
            return
        with torch.cuda.stream(self._stream):
            self._mover.apply(moves)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        self._under_way.append(done)
        while len(self._under_way) > 1:
            wait_for(self._under_way.popleft())

    def finish(self) -> None:
        """Returns when all bytes are where they belong."""
        while self._under_way:
            wait_for(self._under_way.popleft())
