"""The output tokens of simulated requests, and which of them a draft foresees.

Nothing here depends on when a token comes or in which batch: outputs are the same with drafts and
without, at every rate.
"""

import numpy as np

from scheduler_svc.core.request.request import TokenIds
from simulator.capacity.workload import Arrival

_UNKNOWN = 1  # where a token was never recorded: what it is changes nothing


class Outputs:
    """The outputs of a workload's requests by handle, in order of their submission."""

    def __init__(self, vocab_size: int, acceptance: float = 0.0, seed: int = 0) -> None:
        """A draft of a token comes true with probability `acceptance`, 0 to 1, by the seed."""
        self._vocab_size = vocab_size
        self._acceptance = acceptance
        self._seed = seed
        self._arrivals: list[Arrival] = []
        self._foreseen: dict[int, TokenIds] = {}  # [output tokens], right or not

    def add(self, arrival: Arrival) -> None:
        """Takes the request with the next handle."""
        self._arrivals.append(arrival)

    def of(self, handle: int) -> TokenIds:
        """All output tokens of a request [N]: those recorded, if it has any."""
        arrival = self._arrivals[handle]
        token_ids = np.full(arrival.output_tokens, _UNKNOWN, dtype=np.int32)
        if arrival.recorded is not None:
            known = arrival.recorded.output
            token_ids[: len(known)] = known
        return token_ids

    def foresee(self, handle: int, begin: int, most: int) -> TokenIds:
        """A draft of a request's output from position `begin` on: at most `most` tokens.

        Whether a token of it is right is decided once for each position, whatever is drafted
        before it.
        """
        if handle not in self._foreseen:
            token_ids = self.of(handle)
            drawn = np.random.default_rng((self._seed, handle)).random(len(token_ids))
            wrong: TokenIds = ((token_ids + 1) % self._vocab_size).astype(np.int32)
            self._foreseen[handle] = np.where(drawn < self._acceptance, token_ids, wrong)
        return self._foreseen[handle][begin : begin + most]
