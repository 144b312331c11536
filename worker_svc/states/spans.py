"""The order in which a step updates states: which tokens of which sequences go in one call."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from worker_svc.attention.batch import AttentionBatch


@dataclass(frozen=True, slots=True)
class StateSpan:
    """Sequences whose states are updated together, with equally many tokens each."""

    sequences: Sequence[int]
    tokens: Sequence[int]  # of the step's T; those of a sequence follow each other
    num_after: int = 0  # tokens of its sequence in later spans
    snapshot: int | None = None  # made after it, of a sequence that goes on in the next span

    @property
    def is_cut(self) -> bool:
        """True if its sequence goes on in the next span."""
        return self.snapshot is not None


def spans(batch: AttentionBatch) -> Iterator[StateSpan]:
    """A step in parts: all sequences with one token together, each longer one alone.

    A longer one is cut where a snapshot of its states is due. Waits for the device, unless all
    sequences have one token.
    """
    if batch.is_decode:
        everything = range(len(batch.context_lens))
        yield StateSpan(everything, everything)
        return
    starts = batch.cu_seqlens_q.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    single = [i for i, length in enumerate(lengths) if length == 1]
    if single:
        yield StateSpan(single, [starts[i] for i in single])
    for i, length in enumerate(lengths):
        begin = 0
        for cut in (cut for cut in batch.state_cuts if cut.sequence == i):
            tokens = range(starts[i] + begin, starts[i] + cut.num_tokens)
            yield StateSpan([i], tokens, length - cut.num_tokens, cut.snapshot)
            begin = cut.num_tokens
        if length > 1:
            yield StateSpan([i], range(starts[i] + begin, starts[i] + length))
