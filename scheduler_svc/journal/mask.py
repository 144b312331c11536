"""Replaces tokens in a recording, so that it reveals everything about a run except its text.

Every token becomes another id of the vocabulary, which depends on a key and on all tokens before
it. So equal prefixes stay equal and different ones different, which is all that the core's plans
depend on; but the same id never means the same token twice, so counting ids reveals nothing. The
key is drawn for each recording and kept in memory only.

Stop tokens depend on the real tokens. Replaced requests therefore have none: when a stop token ends
a request, the recording has the event `set_stop_ids` before it.
"""

from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core import (
    Drafts,
    EnteringSequence,
    FinishReason,
    Request,
    Requirement,
    SchedulerConfig,
    Sequence,
    SessionHint,
    StepOutputs,
    StepPlan,
    StepResult,
)
from scheduler_svc.core.request.request import Extra
from scheduler_svc.core.step.plan import WorkerDraft
from scheduler_svc.sampling import Sampling

Hashes = NDArray[np.uint64]
Tokens = NDArray[np.int32]
KEY_BYTES = 16
_NUM_UNITS = 4096
_TOP_BITS = np.uint64(64 - 12)
_SHIFT = np.uint64(32)


class Mask:
    """The replacements of one recording; sees requests, plans and results in the core's order."""

    def __init__(self, vocab_size: int, max_num_seqs: int, key: bytes) -> None:
        self._key = key
        self._vocab_size = np.uint64(vocab_size)
        self._prefix_key, self._token_key = np.frombuffer(key, dtype=np.uint64)
        self._units = _units_of(vocab_size, np.random.default_rng(list(key)))
        # By slot: hash and number of the known tokens.
        self._hash: Hashes = np.zeros(max_num_seqs, dtype=np.uint64)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.uint64)
        self._slot_of: dict[str, int] = {}  # last slot of each request
        self._sampled: dict[int, Tokens] = {}  # step id to the slots that sample

    # --- replaced values -------------------------------------------------------------------------

    def config(self, config: SchedulerConfig) -> SchedulerConfig:
        """The configuration without stop tokens."""
        return replace(config, eos_token_ids=())

    def request(self, request: Request) -> Request:
        """The request with replaced prompt, names and pictures, and without token lists."""
        output = request.output_token_ids
        if output is not None:  # a replacement depends on all tokens before it
            num_prompt = len(request.prompt_token_ids)
            output = self.tokens(np.concatenate((request.prompt_token_ids, output)))[num_prompt:]
        return replace(
            _without_tokens(request),
            prompt_token_ids=self.tokens(request.prompt_token_ids),
            output_token_ids=output,
            cache_salt=self.name(request.cache_salt),
            session=None if request.session is None else self._session(request.session),
            extras=tuple(self._extra(extra) for extra in request.extras),
            requirements=tuple(self._requirement(one) for one in request.requirements),
            pictures=None,
        )

    def name(self, name: str) -> str:
        """Another name that tells equal ones apart from others, and no more; none for none."""
        hidden = blake2b(name.encode(), key=self._key, digest_size=8).hexdigest()
        return hidden if name else ""

    def _session(self, hint: SessionHint) -> SessionHint:
        return replace(
            hint,
            session_id=self.name(hint.session_id),
            parent_id=self.name(hint.parent_id),
            prefix_key=self.name(hint.prefix_key),
        )

    def _extra(self, extra: Extra) -> Extra:
        """The picture with a content id that tells equal ones apart from others, and no more."""
        hidden = blake2b(extra.to_bytes(), key=self._key, digest_size=16).digest()
        return replace(extra, content_id=int.from_bytes(hidden, "little"))

    def _requirement(self, one: Requirement) -> Requirement:
        """The requirement under a key that tells equal ones apart from others, and no more."""
        return replace(one, key=self.name(one.key))

    def sequence(self, sequence: Sequence) -> Sequence:
        """Replaces the tokens of a migrated sequence; changes the copy given."""
        sequence.request = self.request(sequence.request)
        sequence.token_ids = self.tokens(sequence.token_ids)
        sequence.stop_ids = ()
        sequence.forget_hashes("")  # it gets those of the core that it migrates to
        return sequence

    def plan(self, plan: StepPlan) -> StepPlan:
        """The plan with replaced tokens."""
        self._sampled[plan.step_id] = plan.sampled_slots
        drafts = self.drafts(plan.drafts)  # before other sequences enter their slots
        entering = [self._entering(new) for new in plan.new_sequences]
        return replace(plan, new_sequences=entering, drafts=drafts)

    def drafts(self, drafts: Drafts) -> Drafts:
        """Drafts with replaced tokens: those that come true are replaced alike when they do."""
        return {slot: self._draft(slot, draft) for slot, draft in drafts.items()}

    def _draft(self, slot: int, draft: Tokens | WorkerDraft) -> Tokens | WorkerDraft:
        return draft if isinstance(draft, WorkerDraft) else self._following(slot, draft)[0]

    def result(
        self, result: StepResult, outputs: StepOutputs
    ) -> tuple[StepResult, dict[str, tuple[Any, ...]]]:
        """Returns the replaced result, and by id of requests that a stop token ended, which it was.

        Of a row with several tokens also how long the sequence is with it: a token before it may
        have been replaced by the same id.
        """
        slots = self._sampled.pop(result.step_id).astype(np.intp)
        if result.num_sampled is not None:
            slots = np.repeat(slots, result.num_sampled)
        rows = outputs.sampled_rows
        if rows is None:
            rows = np.arange(len(slots))
        token_ids = np.zeros_like(result.token_ids)  # irrelevant where no request takes it
        if result.num_sampled is None:
            token_ids[rows] = self._append(slots[rows], result.token_ids[rows])
        else:
            for slot in np.unique(slots[rows]).tolist():
                own = rows[slots[rows] == slot]  # in the order in which they were sampled
                token_ids[own] = self._append_all(slot, result.token_ids[own])
        stops: dict[str, tuple[Any, ...]] = {}
        for finished in outputs.finished:
            slot = self._slot_of.pop(finished.request.request_id, None)
            if finished.reason is FinishReason.STOP:
                stop_id = int(token_ids[rows[slots[rows] == slot][-1]])
                length = () if result.num_sampled is None else (int(self._num_tokens[slot]),)
                stops[finished.request.request_id] = ((stop_id,), *length)
        dead_ends = dict.fromkeys(result.dead_ends, "no token was left")  # hides the caller's text
        return replace(result, token_ids=token_ids, dead_ends=dead_ends), stops

    def forget(self, request_id: str) -> None:
        """Forgets a request that ended in another way."""
        self._slot_of.pop(request_id, None)

    def forget_steps(self, first: int = 0, last: int | None = None) -> None:
        """Forgets steps `first` to `last`, by default all, because their results will not come."""
        kept = (s for s in self._sampled if s < first or (last is not None and s > last))
        self._sampled = {step_id: self._sampled[step_id] for step_id in kept}

    def _entering(self, new: EnteringSequence) -> EnteringSequence:
        slot, num_tokens = new.slot, len(new.token_ids)
        terms = self._terms(new.token_ids, np.arange(num_tokens, dtype=np.uint64))
        self._hash[slot], self._num_tokens[slot] = terms.sum(dtype=np.uint64), num_tokens
        self._slot_of[new.request.request_id] = slot
        return replace(
            new,
            request=_without_tokens(new.request),
            token_ids=self.tokens(new.token_ids),
            stop_ids=(),
        )

    def _append(self, slots: NDArray[np.intp], token_ids: Tokens) -> Tokens:
        masked = self._permuted(self._hash[slots], token_ids)
        self._hash[slots] += self._terms(token_ids, self._num_tokens[slots])
        self._num_tokens[slots] += np.uint64(1)
        return masked

    def _append_all(self, slot: int, token_ids: Tokens) -> Tokens:
        masked, following = self._following(slot, token_ids)
        self._hash[slot] = following
        self._num_tokens[slot] += np.uint64(len(token_ids))
        return masked

    def _following(self, slot: int, token_ids: Tokens) -> tuple[Tokens, np.uint64]:
        """Replacements for tokens that follow a slot's known ones, and the hash after them all."""
        positions = self._num_tokens[slot] + np.arange(len(token_ids), dtype=np.uint64)
        terms = self._terms(token_ids, positions)
        ends = self._hash[slot] + np.cumsum(terms, dtype=np.uint64)
        masked = self._permuted(ends - terms, token_ids)
        return masked, ends[-1] if len(ends) else self._hash[slot]

    # --- tokens ----------------------------------------------------------------------------------

    def tokens(self, token_ids: Tokens) -> Tokens:
        """Replacements for the tokens of a sequence, from its first on."""
        terms = self._terms(token_ids, np.arange(len(token_ids), dtype=np.uint64))
        return self._permuted(np.cumsum(terms, dtype=np.uint64) - terms, token_ids)

    def _terms(self, token_ids: Tokens, positions: Hashes) -> Hashes:
        """Each token's term in the hash of the prefix that it ends."""
        return _mixed(_mixed(positions << _SHIFT | token_ids.astype(np.uint64)) ^ self._prefix_key)

    def _permuted(self, prefixes: Hashes, token_ids: Tokens) -> Tokens:
        """Permutes each token by an affine map that depends on its prefix."""
        drawn = _mixed(prefixes ^ self._token_key)
        factors = self._units[(drawn >> _TOP_BITS).astype(np.intp)]
        shifted = factors * token_ids.astype(np.uint64) + drawn % self._vocab_size
        return (shifted % self._vocab_size).astype(np.int32)


def _units_of(vocab_size: int, rng: np.random.Generator) -> Hashes:
    """Factors that permute the vocabulary: coprime to its size."""
    candidates = rng.integers(1, vocab_size, 16 * _NUM_UNITS, endpoint=True)
    units = candidates[np.gcd(candidates, vocab_size) == 1]
    return np.resize(units, _NUM_UNITS).astype(np.uint64)


def _without_tokens(request: Request) -> Request:
    """The request without token lists and grammar."""
    sampling = request.sampling
    if isinstance(sampling, Sampling):
        sampling = replace(sampling, logit_bias=(), allowed_token_ids=(), bad_words_token_ids=())
        sampling = replace(sampling, grammar="", logprob_token_ids=())
    return replace(request, stop_token_ids=(), ignore_eos=False, sampling=sampling)


def _mixed(values: Hashes) -> Hashes:
    """A bijection that spreads every bit over all (the finalizer of splitmix64)."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
