"""Finds the prompt tokens that fit into a step of decoding rows, so that it keeps a target time.

The rows that decode wait for the whole step. What a prompt token adds to it depends on the device,
the model and the number of tokens, so it is measured: the part of a mixed step that exceeds a plain
one, divided by its prompt tokens. A step that was too long lowers the limit at once; one that was
short enough raises it, at most twofold.
"""

LEAST_PROMPT_TOKENS = 32  # prompts go on, however long steps take
_FIRST_PROMPT_TOKENS = 64  # before any mixed step was measured
_MOST_GROWTH = 2.0  # of the limit, by one measurement


class PromptPace:
    """The limit for one worker, in prompt tokens. Without a target there is none."""

    def __init__(self, target_s: float | None) -> None:
        self._target_s = target_s
        self._limit = _FIRST_PROMPT_TOKENS

    def new_worker(self) -> None:
        """Forgets the last worker's pace."""
        self._limit = _FIRST_PROMPT_TOKENS

    @property
    def most_prompt_tokens(self) -> int | None:
        """The limit of the next step in which rows decode; None without a target."""
        return None if self._target_s is None else self._limit

    def observe(self, num_prompt_tokens: int, duration_s: float, decode_s: float) -> None:
        """A mixed step took so long; a plain decode step takes `decode_s`, 0 if none was measured.

        Where decoding alone takes longer than the target, the limit falls to its least value.
        """
        if self._target_s is None:
            return
        per_token_s = max((duration_s - decode_s) / num_prompt_tokens, 1e-9)
        fits = int(max(self._target_s - decode_s, 0.0) / per_token_s)
        most = int(_MOST_GROWTH * self._limit)
        self._limit = max(LEAST_PROMPT_TOKENS, min(fits, most))
