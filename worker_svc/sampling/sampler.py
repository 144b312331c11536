"""Sampling: from logits to tokens, with parameters per row.

Order: log probabilities if requested, logits processors, temperature, min-p, top-k, top-p, draw.
Greedy rows take the argmax, other rows are drawn by Gumbel-max sampling: unfiltered rows over the
whole vocabulary, filtered rows among their most likely candidates. A row's token depends only on
its own logits, parameters, seed and output position. With tensor parallelism, rows that need no
filter, logits processor or log probability take the best of the ranks' best tokens, which is the
same token. Stateless and independent of slots and requests.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from wire.sampling import GREEDY_TEMPERATURE
from worker_svc.parallel.vocab_part import VocabPart
from worker_svc.protocol.step import IntColumn
from worker_svc.sampling import logprobs
from worker_svc.sampling.logits_processors import (
    LogitsProcessors,
    process_logits,
)
from worker_svc.sampling.logprobs import Logprobs, Wanted
from worker_svc.sampling.random_numbers import gumbel_noise, noise_keys

# Candidates of a filtered row: nearly always enough, and far cheaper than sorting a vocabulary. A
# row that keeps more is cut by cumulative weight or, with top-k, retried with the next width and in
# the end with a full sort.
CANDIDATE_WIDTHS = (1024, 8192)
# Buckets of equal width in log weight, for rows that keep more than the first width.
BUCKETS_PER_UNIT = 64.0
NUM_BUCKETS = 2048
TILE = 256


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of the rows that sample, as host columns [R]."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: IntColumn
    min_p: NDArray[np.float32]
    seed: IntColumn  # bits of the uint64 seed
    output_position: IntColumn
    logits_processors: LogitsProcessors = field(default_factory=LogitsProcessors)
    wanted: Wanted = field(default_factory=Wanted.nothing)  # log probabilities

    def __len__(self) -> int:
        return len(self.temperature)

    @property
    def is_filtered(self) -> NDArray[np.bool_]:
        """Rows [R] that sample from a part of the vocabulary."""
        return is_filtered(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def need_whole_rows(self) -> bool:
        """True if any row needs logits of the whole vocabulary on one rank."""
        return bool(self.logits_processors) or bool(len(self.wanted) or self.is_filtered.any())

    @classmethod
    def alike(cls, num_rows: int, temperature: float, top_p: float) -> "SamplingRows":
        """Rows with equal parameters, for a step without requests."""
        return cls(
            temperature=np.full(num_rows, temperature, dtype=np.float32),
            top_p=np.full(num_rows, top_p, dtype=np.float32),
            top_k=np.zeros(num_rows, dtype=np.int64),
            min_p=np.zeros(num_rows, dtype=np.float32),
            seed=np.zeros(num_rows, dtype=np.int64),
            output_position=np.zeros(num_rows, dtype=np.int64),
        )


@dataclass(frozen=True, slots=True)
class Checked:
    """Rows of processed logits that can be sampled from."""

    finite: Tensor  # [R] bool
    # [R] bool: the logits processors left a token, or the row is not finite; None: true of all
    # rows.
    has_choice: Tensor | None = None

    @property
    def is_good(self) -> Tensor:
        """Rows [R] that are finite and have an allowed token."""
        return self.finite if self.has_choice is None else self.finite & self.has_choice


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row, and whether its logits were finite (if not, the token is 0)."""

    token_ids: Tensor  # [R] int64
    finite: Tensor  # [R] bool
    logprobs: Logprobs | None = None  # of the rows that request them
    has_choice: Tensor | None = None  # [R] bool, see `Checked`


def is_filtered(
    temperature: NDArray[np.float32],
    top_k: IntColumn,
    top_p: NDArray[np.float32],
    min_p: NDArray[np.float32],
) -> NDArray[np.bool_]:
    """Rows [R] that exclude tokens by top-k, top-p or min-p; greedy rows never do."""
    filters: NDArray[np.bool_] = (top_k > 0) | (top_p < 1) | (min_p > 0)
    return filters & (temperature >= GREEDY_TEMPERATURE)


def sample_part(part: VocabPart, rows: SamplingRows) -> Sampled:
    """`sample` on all ranks: each passes its part of the logits, all get the same tokens."""
    if part.group.size == 1 or rows.need_whole_rows:
        return sample(part.whole().float(), rows)
    logits = part.logits.float()
    scores, token_ids = _best(logits, rows, part.first_token)
    scores.masked_fill_(~logits.sum(-1).isfinite(), float("nan"))
    # One tensor for one collective; float64 represents every token id exactly.
    bests = part.group.gather(torch.stack((scores, token_ids.double())))  # [P, 2, R]
    scores, token_ids = bests.unbind(1)
    finite = ~scores.isnan().any(0)
    # Of equal scores the first, which is the lowest token: parts come in the order of their tokens.
    winner = scores.argmax(0, keepdim=True)  # [1, R]
    tokens = token_ids.gather(0, winner).squeeze(0).long()
    return Sampled(tokens.masked_fill_(~finite, 0), finite)


def sample(logits: Tensor, rows: SamplingRows) -> Sampled:
    """Chooses a token per row of logits [R, V] float32, which it may overwrite."""
    wanted = rows.wanted
    raw = None
    if len(wanted):
        index = _to(wanted.rows, logits)
        raw = logprobs.distributions(logits, index)  # [N, V]
    checked = process_and_check(logits, rows.logits_processors)
    is_good = checked.is_good
    token_ids = _choose(logits, rows, is_good).masked_fill_(~is_good, 0)
    if raw is None:
        return Sampled(token_ids, checked.finite, None, checked.has_choice)
    sampled = token_ids.index_select(0, index)
    found = logprobs.look_up(raw, wanted, sampled, logprobs.likeliest(raw, wanted))
    return Sampled(token_ids, checked.finite, found, checked.has_choice)


def process_and_check(logits: Tensor, logits_processors: LogitsProcessors) -> Checked:
    """Applies logits processors to logits [R, V] in place and checks the rows."""
    # A sum is finite only if every term is, and needs no mask of the whole matrix.
    finite = logits.sum(-1).isfinite()  # [R]
    if not logits_processors:
        return Checked(finite)
    process_logits(logits, logits_processors)
    largest = logits.amax(-1)
    has_choice = largest != float("-inf")
    finite &= largest.isfinite() | ~has_choice
    return Checked(finite, has_choice | ~finite)


def _choose(logits: Tensor, rows: SamplingRows, finite: Tensor) -> Tensor:
    """Tokens [R]; arbitrary for rows that are not finite."""
    greedy = rows.temperature < GREEDY_TEMPERATURE
    if greedy.all():
        return _largest(logits)
    filtered = rows.is_filtered
    token_ids = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    for group, draw in (
        (greedy, _draw_greedy),
        (~greedy & ~filtered, _draw_unfiltered),
        (filtered, _draw_filtered),
    ):
        chosen = np.flatnonzero(group)
        if len(chosen):
            index = _to(chosen, logits)
            group_logits = logits.index_select(0, index)
            # A row that is not finite gets an error status; zeros keep the arithmetic in range.
            group_logits.masked_fill_(~finite.index_select(0, index)[:, None], 0.0)
            token_ids[index] = draw(group_logits, rows, chosen)
    return token_ids


def _draw_greedy(logits: Tensor, rows: SamplingRows, chosen: IntColumn) -> Tensor:
    return _largest(logits)


def _largest(values: Tensor) -> Tensor:
    """The first largest value's place [R] in each row [R, N]; arbitrary where one is NaN."""
    if values.device.type == "cuda":
        return values.argmax(-1)
    # A twentieth of torch's time, which takes 1.3 ms of a core for 16 rows of 49,152 values.
    return torch.from_numpy(values.numpy().argmax(-1))


def _draw_unfiltered(logits: Tensor, rows: SamplingRows, chosen: IntColumn) -> Tensor:
    """Tokens [N] by Gumbel-max over the whole vocabulary."""
    return _largest(_gumbel_scores(logits, rows, chosen, first_token=0))


def _best(logits: Tensor, rows: SamplingRows, first_token: int) -> tuple[Tensor, Tensor]:
    """Best scores float64 [R] and tokens [R] in a part [R, N] of the vocabulary; no filters."""
    values, at = logits.max(-1)
    scores = values.double()
    sampled = np.flatnonzero(rows.temperature >= GREEDY_TEMPERATURE)
    if len(sampled):
        index = _to(sampled, logits)
        perturbed = _gumbel_scores(logits.index_select(0, index), rows, sampled, first_token)
        scores[index], at[index] = perturbed.max(-1)
    return scores, at + first_token


def _gumbel_scores(
    logits: Tensor, rows: SamplingRows, chosen: IntColumn, first_token: int
) -> Tensor:
    """Gumbel-max scores float64 [R, N] of consecutive tokens, equal in any part of the vocabulary.

    They must not depend on other parts, not even on the row's largest logit. float64 keeps the
    noise exact next to logits that a low temperature makes huge.
    """
    end = first_token + logits.shape[1]
    token_ids = torch.arange(first_token, end, dtype=torch.int32, device=logits.device)
    noise = gumbel_noise(_noise_keys(rows, chosen, logits), token_ids)
    temperature = _to(rows.temperature[chosen], logits).double()[:, None]
    return logits.double().div_(temperature).add_(noise)


def _draw_filtered(logits: Tensor, rows: SamplingRows, chosen: IntColumn) -> Tensor:
    """Tokens [N] by Gumbel-max among the tokens that the filters keep."""
    scaled = _scale(logits, rows, chosen)  # [R, V]
    # Summed by tiles: torch splits the sum over a row among threads differently if the row is
    # alone.
    totals = _tiles(scaled.exp()).sum(-1).double().sum(-1)  # [R]
    token_ids = torch.zeros(len(chosen), dtype=torch.int64, device=logits.device)
    vocab_size = logits.shape[1]
    widths = (*(width for width in CANDIDATE_WIDTHS if width < vocab_size), vocab_size)
    is_wide = _is_surely_wide(totals, widths[0], rows, chosen)
    pending = np.flatnonzero(~is_wide)
    keys = _sort_keys(scaled) if len(pending) else None
    for width in widths:
        if keys is None or not len(pending):
            break
        index = _to(pending, logits)
        values, ids = _candidates(keys.index_select(0, index), width)
        is_whole = width == vocab_size
        kept = _keep(values, totals.index_select(0, index), is_whole, rows, chosen[pending])
        row_keys = _noise_keys(rows, chosen[pending], logits)
        scores = gumbel_noise(row_keys, ids.int()).add_(values)  # [P, W]
        ranks = torch.arange(width, device=scores.device)
        scores.masked_fill_(ranks >= kept.count[:, None], float("-inf"))
        picked = ids.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)
        token_ids[index] = torch.where(kept.is_complete, picked, 0)
        pending = pending[~kept.is_complete.cpu().numpy()]
        # Only top-k needs sorted candidates; other rows continue without sorting.
        is_wide[pending] = rows.top_k[chosen[pending]] == 0
        pending = pending[~is_wide[pending]]
    wide = np.flatnonzero(is_wide)
    if len(wide):
        index = _to(wide, logits)
        token_ids[index] = _draw_wide(scaled.index_select(0, index), rows, chosen[wide])
    return token_ids


def _is_surely_wide(
    totals: Tensor, width: int, rows: SamplingRows, chosen: IntColumn
) -> NDArray[np.bool_]:
    """Rows [R] with a top-p that keeps more than `width` tokens, each of weight 1 at most."""
    needed = totals.cpu().numpy() * rows.top_p[chosen]
    is_unbounded = (rows.top_k[chosen] == 0) & (rows.min_p[chosen] == 0)
    is_wide: NDArray[np.bool_] = is_unbounded & (needed > width)
    return is_wide


def _draw_wide(scaled: Tensor, rows: SamplingRows, chosen: IntColumn) -> Tensor:
    """Tokens [N] by Gumbel-max among the tokens kept by min-p and top-p, without a full sort.

    Weights are summed in buckets, from the most likely down. Only the bucket in which the sum
    reaches top-p is sorted and cut.
    """
    top_p = _to(rows.top_p[chosen], scaled).double()
    bar = _to(rows.min_p[chosen], scaled).log()[:, None]
    weights = scaled.exp().masked_fill_(scaled < bar, 0.0).double()  # [R, V]
    buckets = (scaled * -BUCKETS_PER_UNIT).clamp_(max=NUM_BUCKETS - 1).long()
    masses = weights.new_zeros((len(scaled), NUM_BUCKETS)).scatter_add_(1, buckets, weights)
    ends = masses.cumsum(-1)
    needed = top_p * ends[:, -1]
    cut = (ends < needed[:, None]).sum(-1).clamp_(max=NUM_BUCKETS - 1)  # [R]
    before = (ends - masses).gather(1, cut[:, None]).squeeze(1)
    dropped = (buckets > cut[:, None]) | (scaled < bar)
    for row in np.flatnonzero(rows.top_p[chosen] < 1).tolist():
        inside = (buckets[row] == cut[row]).nonzero().squeeze(1)
        order = _sort_keys(scaled[row])[inside].argsort(descending=True)
        reached = before[row] + weights[row, inside[order]].cumsum(0)
        num_kept = int((reached < needed[row]).sum()) + 1
        dropped[row, inside[order[num_kept:]]] = True
    token_ids = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
    noise = gumbel_noise(_noise_keys(rows, chosen, scaled), token_ids).add_(scaled)
    return _largest(noise.masked_fill_(dropped, float("-inf")))


@dataclass(frozen=True, slots=True)
class _KeptCandidates:
    """The sorted candidates [P, W] that the filters keep."""

    count: Tensor  # [P], length of the kept prefix, at least 1
    is_complete: Tensor  # [P] bool: no kept token is missing


def _keep(
    values: Tensor, totals: Tensor, is_whole: bool, rows: SamplingRows, chosen: IntColumn
) -> _KeptCandidates:
    """Applies the filters to candidates, sorted and relative to the largest logit."""
    width = values.shape[1]
    top_k = _to(rows.top_k[chosen], values)
    top_p = _to(rows.top_p[chosen], values).double()
    min_p = _to(rows.min_p[chosen], values)
    # Both filters become a threshold, so that tokens equal to it are kept or dropped together.
    kth = values.gather(1, (top_k.clamp(1, width) - 1)[:, None]).squeeze(1)
    kth = torch.where((top_k > 0) & (top_k <= width), kth, float("-inf"))
    bar = torch.maximum(min_p.log(), kth)  # [P]
    num_survivors = (values >= bar[:, None]).sum(-1)
    ends = values.exp().double().cumsum(-1)  # [P, W]
    is_bounded = (num_survivors < width) | is_whole
    mass = torch.where(is_bounded, ends.gather(1, num_survivors[:, None] - 1).squeeze(1), totals)
    nucleus = (ends < (top_p * mass)[:, None]).sum(-1) + 1
    count = torch.where(top_p < 1, torch.minimum(nucleus, num_survivors), num_survivors)
    # The mass is known if all survivors are candidates, or if top-p is the only filter. A value
    # equal to the last candidate's may be tied with tokens that are no candidates.
    is_mass_known = is_bounded | ((top_k == 0) & (min_p == 0))
    last_kept = values.gather(1, count[:, None] - 1).squeeze(1)
    is_complete = (is_mass_known & (last_kept > values[:, -1])) | is_whole
    return _KeptCandidates(count, is_complete)


def _sort_keys(scaled: Tensor) -> Tensor:
    """int64 keys [..., V] sorted like (value, lower id first); no two keys of a row are equal.

    So the largest keys are the same with every device, width and top-k algorithm.
    """
    bits = scaled.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # reverses the order of negative floats
    rank = torch.arange(scaled.shape[-1] - 1, -1, -1, device=scaled.device)
    return (ordered.long() << 32) | rank


def _candidates(keys: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest values and their ids, both [P, width], in descending order of keys."""
    vocab_size = keys.shape[1]
    if width < vocab_size:
        largest = keys.topk(width, dim=-1).values
    else:
        largest = keys.sort(dim=-1, descending=True).values
    ordered = (largest >> 32).int()
    values = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return values, vocab_size - 1 - (largest & 0xFFFFFFFF)


def _scale(logits: Tensor, rows: SamplingRows, chosen: IntColumn) -> Tensor:
    """(logits - row maximum) / temperature; overwrites logits."""
    temperature = _to(rows.temperature[chosen], logits)[:, None]
    return logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature)


def _tiles(weights: Tensor) -> Tensor:
    """Weights [R, V] as [R, V / TILE, TILE], padded with zeros."""
    weights = functional.pad(weights, (0, -weights.shape[1] % TILE))
    return weights.view(weights.shape[0], -1, TILE)


def _noise_keys(rows: SamplingRows, chosen: IntColumn, like: Tensor) -> Tensor:
    return noise_keys(_to(rows.seed[chosen], like), _to(rows.output_position[chosen], like))


def _to(column: NDArray[np.int64] | NDArray[np.float32], like: Tensor) -> Tensor:
    return torch.from_numpy(column).to(like.device)
