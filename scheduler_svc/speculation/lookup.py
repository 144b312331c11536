"""Finds what may come next in the tokens of a sequence, or of others: what followed such tokens.

Nothing is kept between two calls: the tokens alone decide, in a few passes over them.
"""

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request.request import TokenIds
from scheduler_svc.speculation.options import Method, SpeculationOptions

IntArray = NDArray[np.integer[Any]]
_Positions = NDArray[np.intp]

_LEAST_SUFFIX = 2  # one token that agrees predicts little: random text has many
_FEW = 128  # positions that are compared, or counted, with all their tokens at once
_FEW_STEPS = 6  # as many, of one token more each, are no slower than all at once
_LEAST_ROWS = 8  # that are searched at once: fewer are quicker one by one
_WIDTHS = (512, 2_048, 4_096)  # rows in between are searched at once; longer ones one by one
_MOST_AT_ONCE = 1 << 17  # tokens of the rows that are searched at once, which fit a cache
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


def look_up_rows(
    token_ids: TokenIds, slots: IntArray, num_known: IntArray, options: SpeculationOptions
) -> list[TokenIds]:
    """`look_up` of each row: the first num_known [R] tokens of the slots [R] of [S, L].

    With `ngram`, rows of similar length are searched at once.
    """
    found = [_NOTHING] * len(slots)
    groups = _groups(num_known) if options.method is Method.NGRAM else [np.arange(len(slots))]
    for rows in groups:
        if _is_quicker_at_once(num_known[rows], options):
            known_tokens = token_ids[slots[rows], : num_known[rows[-1]]]
            drafts = _look_up_at_once(known_tokens, num_known[rows], options)
        else:
            known_rows = zip(slots[rows].tolist(), num_known[rows].tolist(), strict=True)
            drafts = [look_up(token_ids[slot, :known], options) for slot, known in known_rows]
        for row, draft in zip(rows.tolist(), drafts, strict=True):
            found[row] = draft
    return found


def _is_quicker_at_once(num_known: IntArray, options: SpeculationOptions) -> bool:
    """True if rows [R], of which the last is the longest, are better not searched one by one."""
    is_short = len(num_known) >= _LEAST_ROWS and num_known[-1] <= _WIDTHS[-1]
    return is_short and options.method is Method.NGRAM


def _groups(num_known: IntArray) -> list[_Positions]:
    """Rows of similar length, in groups of few tokens; the longest row of each is the last."""
    if len(num_known) < _LEAST_ROWS:
        return [np.arange(len(num_known))]
    order = num_known.argsort()
    bounds = num_known[order].searchsorted(_WIDTHS, side="right")
    groups = []
    for similar in np.split(order, bounds):
        if len(similar):
            at_once = max(_MOST_AT_ONCE // int(num_known[similar[-1]]), _LEAST_ROWS)
            groups += [similar[i : i + at_once] for i in range(0, len(similar), at_once)]
    return groups


def _look_up_at_once(
    token_ids: TokenIds, num_known: IntArray, options: SpeculationOptions
) -> list[TokenIds]:
    """The drafts of `ngram` for each of the rows [R, W], of which so many tokens [R] are known."""
    num_rows, width = token_ids.shape
    flat = token_ids.ravel()  # [R * W]
    last = np.arange(num_rows) * width + num_known - 1  # in `flat`, each row's last token
    agrees = token_ids == flat[last][:, None]
    agrees &= np.arange(width) < num_known[:, None] - 1
    found = agrees.ravel().nonzero()[0]  # in `flat`, where what agrees ends
    if len(found) > len(flat) // 2:  # one token again and again: nothing is won at once
        rows = zip(token_ids, num_known.tolist(), strict=True)
        return [look_up(row[:known], options) for row, known in rows]
    first = last - num_known + 1
    lengths = np.zeros(num_rows, dtype=np.intp)
    begins = np.zeros(num_rows, dtype=np.intp)  # in `flat`, where the draft of each row begins
    for length in range(1, options.prompt_lookup_max + 1):
        if not len(found):
            break
        latest = found[found.searchsorted(last) - 1]  # of each row, or of another if it has none
        has_any = (latest >= first) & (latest < last)
        lengths[has_any] = length
        begins[has_any] = latest[has_any] + 1
        found = _narrowed(flat, found, width, last - length, length)
    periods = (last + 1 - begins)[:, None]
    steps = np.arange(options.num_speculative_tokens) % periods
    drafts = flat[begins[:, None] + steps]  # [R, D]
    is_found = (lengths >= options.prompt_lookup_min).tolist()
    return [draft if found else _NOTHING for draft, found in zip(drafts, is_found, strict=True)]


def _narrowed(
    flat: TokenIds, found: _Positions, width: int, compared: _Positions, length: int
) -> _Positions:
    """Places found that agree in the token `length` before, too; for each row [R] the compared."""
    rows = found // width
    agrees = flat[found - length] == flat[compared][rows]
    agrees &= found - rows * width >= length
    narrowed: _Positions = found[agrees]
    return narrowed


def _longest(token_ids: TokenIds, most: int) -> tuple[_Positions, int]:
    """The places where the longest end of the tokens occurred: positions after it; its length.

    At most `most` tokens are compared. Positions ascend.
    """
    end = len(token_ids)
    found = (token_ids[: end - 1] == token_ids[-1]).nonzero()[0]
    length = min(len(found), 1)
    while length and length < most:
        if length > 1 and len(found) <= _FEW and most - length > _FEW_STEPS:
            return _longest_of_few(token_ids, found, length, most)
        before = found[found >= length]
        longer = before[token_ids[before - length] == token_ids[end - 1 - length]]
        if not len(longer):
            break
        found, length = longer, length + 1
    return found + 1, length


def _longest_of_few(
    token_ids: TokenIds, found: _Positions, length: int, most: int
) -> tuple[_Positions, int]:
    """The same, of positions at which so many tokens are known to agree."""
    end = len(token_ids)
    before = np.arange(length, min(most, end))
    positions = found[:, None] - before  # [F, most - length]
    agrees = token_ids[positions] == token_ids[end - 1 - before]
    agrees &= positions >= 0
    more = np.logical_and.accumulate(agrees, axis=1).sum(axis=1)
    longest = int(more.max())
    return found[more == longest] + 1, length + longest


def _continued(token_ids: TokenIds, begin: int, most: int) -> TokenIds:
    """The tokens from `begin` on; what repeats itself up to the end is repeated further."""
    period = len(token_ids) - begin
    return token_ids[begin + np.arange(most) % period]


def _likeliest(
    token_ids: TokenIds, ends: _Positions, most: int, least_probability: float
) -> TokenIds:
    """Token after token the one that came most often, the latest of equals, while it is likely."""
    drafted: list[int] = []
    probability = 1.0
    while len(drafted) < most and len(ends) > _FEW:
        ends = ends[ends < len(token_ids)]
        ends = ends[token_ids[ends] >= 0]  # where another sequence ends, nothing follows
        if not len(ends):
            break
        following = token_ids[ends]
        values, counts = np.unique(following, return_counts=True)
        highest = counts.max()
        is_most = values[counts == highest]
        latest = following[np.isin(following, is_most)][-1] if len(is_most) > 1 else is_most[0]
        probability *= int(highest) / len(following)
        if probability < least_probability:
            return np.array(drafted, dtype=np.int32)
        drafted.append(int(latest))
        ends = ends[following == latest] + 1
    if len(drafted) < most and len(ends):
        texts = _following(token_ids, ends, most - len(drafted))
        drafted += _likeliest_of_few(texts, probability, least_probability)
    return np.array(drafted, dtype=np.int32)


def _following(token_ids: TokenIds, begins: _Positions, most: int) -> list[list[int]]:
    """So many tokens from each position on, and numbers below 0 after the last of all."""
    positions = begins[:, None] + np.arange(most)
    following = token_ids.take(positions, mode="clip")
    following[positions >= len(token_ids)] = -1
    return following.tolist()  # type: ignore[no-any-return]


def _likeliest_of_few(
    texts: list[list[int]], probability: float, least_probability: float
) -> list[int]:
    """The same as `_likeliest`, counted in Python, which for few is quicker."""
    drafted: list[int] = []
    for place in range(len(texts[0])):
        following = [text[place] for text in texts if text[place] >= 0]
        if not following:
            break
        counts = Counter(following)
        highest = max(counts.values())
        latest = next(token_id for token_id in reversed(following) if counts[token_id] == highest)
        probability *= highest / len(following)
        if probability < least_probability:
            break
        drafted.append(latest)
        texts = [text for text in texts if text[place] == latest]
    return drafted
