"""Common facts of the worker groups: the model they serve, and which group has which worker.

Requests move from group to group, so a worker that would answer otherwise than the others is
refused by name. One worker may be found under several addresses (a name and its IP addresses, of
two families): it belongs to the group that found it first.
"""

from dataclasses import dataclass

from pagewire.v1 import types_pb2, worker_pb2

_SHOWN_HEX = 12
_ALIKE = ("tokenizer_sha256", "dtype", "quantization", "kv_dtype", "block_size", "kv_groups")
_KEPT_EPOCHS = 4096  # of the workers attached last


class WrongWorker(Exception):
    """Raised when a worker serves something other than the others, or is another group's."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """An attached worker, as far as it must be like the others."""

    address: str
    tokenizer_sha256: str
    dtype: str
    quantization: str
    kv_dtype: str
    block_size: int
    kv_groups: str  # in words

    def check_like(self, other: "_Claim") -> None:
        """Raises WrongWorker, naming the first thing that differs where both say what it is."""
        for name in _ALIKE:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine and theirs and mine != theirs:
                raise WrongWorker(
                    f"its {name} is {_short(mine)}, that of worker {other.address} is "
                    f"{_short(theirs)}"
                )


class Served:
    """The model that all worker groups serve, and the workers that they are attached to."""

    def __init__(self) -> None:
        self.term = 0  # epochs begin here, and those of other terms are other schedulers'; 0: none
        self.model: types_pb2.ModelInfo | None = None  # that of the first worker that attached
        self._claims: dict[int, _Claim] = {}  # by incarnation
        self._epochs: dict[int, int] = {}  # by incarnation, the highest that this process used

    def check(self, model: types_pb2.ModelInfo) -> None:
        """Raises WrongWorker for another model."""
        if self.model is None:
            self.model = model
        elif model.config_sha256 != self.model.config_sha256:
            raise WrongWorker(
                f"it serves {model.model} (config {_short(model.config_sha256)}), "
                f"not {self.model.model} (config {_short(self.model.config_sha256)})"
            )

    def claim(self, address: str, worker: worker_pb2.WorkerDescription) -> None:
        """Gives the worker to the group at this address, in place of what that had before.

        Raises WrongWorker if another group has it, or a worker that differs.
        """
        self.release(address)
        model = worker.model
        mine = _Claim(
            address,
            model.tokenizer_sha256,
            model.dtype,
            model.quantization,
            worker.kv_dtype,
            worker.block_size,
            groups_in_words(worker),
        )
        holder = self._claims.get(worker.incarnation)
        if holder is not None:
            raise WrongWorker(f"it is the worker at {holder.address}, by another address")
        for other in self._claims.values():
            mine.check_like(other)
        if worker.incarnation:
            self._claims[worker.incarnation] = mine

    def release(self, address: str) -> None:
        """The group at this address has no worker any more."""
        self._claims = {i: claim for i, claim in self._claims.items() if claim.address != address}

    def epoch_of(self, incarnation: int) -> int:
        """The highest epoch under which this process has attached to a worker; 0: never."""
        return self._epochs.get(incarnation, 0)

    def attached(self, incarnation: int, epoch: int) -> None:
        """Notes the epoch of an attachment, for groups that find the same worker elsewhere."""
        self._epochs.pop(incarnation, None)
        self._epochs[incarnation] = epoch
        while len(self._epochs) > _KEPT_EPOCHS:
            del self._epochs[next(iter(self._epochs))]


def groups_in_words(worker: worker_pb2.WorkerDescription) -> str:
    """The worker's KV groups as text, whether it tells one group or leaves it out."""
    sizes = [(group.block_size, group.window) for group in worker.kv_groups]
    return ", ".join(
        f"{size} tokens" + (f" in a window of {window}" if window else "")
        for size, window in sizes or [(worker.block_size, 0)]
    )


def _short(value: object) -> str:
    return value[:_SHOWN_HEX] if isinstance(value, str) else str(value)
