"""Finds what may come next in the tokens of a sequence, or of others: what followed such tokens.

Nothing is kept between two calls: the tokens alone decide, in a few passes over them.
"""

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request.request import TokenIds
from scheduler_svc.speculation.options import Method, SpeculationOptions

_LEAST_SUFFIX = 2  # one token that agrees predicts little: random text has many
_NOTHING: TokenIds = np.zeros(0, dtype=np.int32)


def look_up(
    token_ids: TokenIds, options: SpeculationOptions, others: TokenIds = _NOTHING
) -> TokenIds:
    """Tokens that may follow the given ones [N], at most num_speculative_tokens; often none.

    With `suffix`, they may come from `others`: sequences with a number below 0 after each.
    """
    most = options.num_speculative_tokens
    if options.method is Method.NGRAM:
        ends, length = _longest(token_ids, options.prompt_lookup_max)
        if length < options.prompt_lookup_min:
            return _NOTHING
        return _continued(token_ids, int(ends[-1]), most)
    depth = min(options.suffix_decoding_max_tree_depth, len(token_ids))
    if len(others):
        token_ids = np.concatenate((others, token_ids))
    ends, length = _longest(token_ids, depth)
    if length < _LEAST_SUFFIX:
        return _NOTHING
    most = min(most, int(options.suffix_decoding_max_spec_factor * length))
    return _likeliest(token_ids, ends, most, options.suffix_decoding_min_token_prob)


def _longest(token_ids: TokenIds, most: int) -> tuple[NDArray[np.intp], int]:
    """Where the longest end of the tokens occurred before: positions after it; its length.

    At most `most` tokens are compared. Positions ascend.
    """
    end = len(token_ids)
    found = (token_ids[: end - 1] == token_ids[-1]).nonzero()[0]
    length = min(len(found), 1)
    while length and length < most:
        before = found[found >= length]
        longer = before[token_ids[before - length] == token_ids[end - 1 - length]]
        if not len(longer):
            break
        found, length = longer, length + 1
    return found + 1, length


def _continued(token_ids: TokenIds, begin: int, most: int) -> TokenIds:
    """The tokens from `begin` on; what repeats itself up to the end is repeated further."""
    period = len(token_ids) - begin
    return token_ids[begin + np.arange(most) % period]


def _likeliest(
    token_ids: TokenIds, ends: NDArray[np.intp], most: int, least_probability: float
) -> TokenIds:
    """Token after token the one that came most often, the latest of equals, while it is likely."""
    drafted: list[int] = []
    probability = 1.0
    while len(drafted) < most:
        ends = ends[ends < len(token_ids)]
        ends = ends[token_ids[ends] >= 0]  # where another sequence ends, nothing follows
        if not len(ends):
            break
        following = token_ids[ends]
        values, counts = np.unique(following, return_counts=True)
        is_most = values[counts == counts.max()]
        token_id = int(following[np.isin(following, is_most)][-1])
        probability *= counts.max() / len(following)
        if probability < least_probability:
            break
        drafted.append(token_id)
        ends = ends[following == token_id] + 1
    return np.array(drafted, dtype=np.int32)
