"""Admission control: which requests enter the queue, and why the others are refused."""

from collections.abc import Container, Iterable

from scheduler_svc.core.queue.continuation import continuation_problem
from scheduler_svc.core.queue.fork_groups import ForkGroups
from scheduler_svc.core.queue.reservations import Reservations
from scheduler_svc.core.queue.waiting import Load, WaitingQueue
from scheduler_svc.core.request.config import Policy, SchedulerConfig
from scheduler_svc.core.request.identity import extras_problem
from scheduler_svc.core.request.request import RefusalKind, Refused, Request
from scheduler_svc.core.request.sequence import Sequence

MAX_TENANT_BYTES = 64
MAX_CACHE_SALT_BYTES = 256
MAX_FORK_GROUP_BYTES = 256
MAX_ADAPTER_ID_BYTES = 256
# Times the queue's limits that a tenant meets with nothing in the queue, under the fair policy: it
# does not wait for the others' places, and their number stays bounded.
ROOM_OF_NEWCOMERS = 2


class Intake:
    """Checks requests against the model's limits and the load of the queue."""

    def __init__(
        self, config: SchedulerConfig, waiting: WaitingQueue, fork_groups: ForkGroups
    ) -> None:
        self._config = config
        self._fork_groups = fork_groups
        self._waiting = waiting
        self._sizes = " and ".join(str(group.block_size) for group in config.groups)
        self.reservations = Reservations()
        self.num_refused = 0  # requests refused for overload

    def accept(self, request: Request, live: Container[str], num_usable_blocks: int) -> Sequence:
        """The sequence of a new request. Raises Refused, naming the field."""
        max_len = self.check(request, live, num_usable_blocks)
        eos = () if request.ignore_eos else self._config.eos_token_ids
        stop_ids = tuple({*eos, *request.stop_token_ids})
        config = self._config
        return Sequence(
            request,
            max_len,
            stop_ids,
            namespace=config.hash_namespace,
            weights_version=config.weights_version,
        )

    def misfits(self, live: Iterable[Sequence], num_usable_blocks: int) -> list[str]:
        """Ids of the live requests that so many blocks cannot hold."""
        return [
            sequence.request.request_id
            for sequence in live
            if self._config.blocks_needed(sequence.max_len) > num_usable_blocks
        ]

    def check(self, request: Request, live: Container[str], num_usable_blocks: int) -> int:
        """Returns the sequence's maximum length, in tokens. Raises Refused, naming the field."""
        problem = (
            self._problem(request)
            or self._fork_groups.problem(request)
            or continuation_problem(request, self._max_len(request), self._config)
        )
        if problem is not None:
            raise Refused(RefusalKind.INVALID, problem)
        if request.request_id in live:
            raise Refused(
                RefusalKind.DUPLICATE, f"request_id {request.request_id!r} is live already"
            )
        max_len = self._max_len(request)
        num_blocks = self._config.blocks_needed(max_len)
        if num_blocks > num_usable_blocks:
            raise Refused(
                RefusalKind.NEVER_FITS,
                f"prompt_token_ids and max_tokens need up to {num_blocks} KV blocks of "
                f"{self._sizes} tokens, the worker has {num_usable_blocks}",
            )
        if request.deadline_s is not None and not request.deadline_s > request.arrival_s:
            raise Refused(RefusalKind.EXPIRED, "the deadline had passed when the request arrived")
        if request.output_token_ids is None or request.resumed_by_client:  # else accepted before
            self._check_load(request)
        return max_len

    def _max_len(self, request: Request) -> int:
        num_prompt, max_len = len(request.prompt_token_ids), self._config.max_model_len
        if request.is_prompt_only:
            return num_prompt + 1  # never reached: the prompt is computed, nothing is sampled
        if request.max_tokens is None:
            return max_len
        return min(max_len, num_prompt + request.max_tokens)

    def _problem(self, request: Request) -> str | None:
        prompt, config = request.prompt_token_ids, self._config
        if not len(prompt):
            return "prompt_token_ids is empty"
        most = config.max_model_len - (not request.is_prompt_only)
        if len(prompt) > most:
            return (
                f"prompt_token_ids has {len(prompt)} tokens; with max_model_len "
                f"{config.max_model_len} at most {most} leave room for output"
            )
        if prompt.min() < 0 or prompt.max() >= config.vocab_size:
            return f"prompt_token_ids has an id outside 0..{config.vocab_size - 1}"
        if request.max_tokens is not None and request.max_tokens < 0:
            return f"max_tokens is {request.max_tokens}, must not be negative"
        if not 0 <= request.prompt_output_begin <= request.prompt_output_end <= len(prompt):
            outputs = f"{request.prompt_output_begin}..{request.prompt_output_end}"
            return f"prompt outputs {outputs} are outside the prompt"
        if request.min_tokens < 0:
            return f"min_tokens is {request.min_tokens}, must not be negative"
        if request.max_tokens is not None and request.min_tokens > request.max_tokens:
            return f"min_tokens ({request.min_tokens}) exceeds max_tokens ({request.max_tokens})"
        if any(not 0 <= token < config.vocab_size for token in request.stop_token_ids):
            return f"stop_token_ids has an id outside 0..{config.vocab_size - 1}"
        if len(request.tenant.encode()) > MAX_TENANT_BYTES:
            return f"tenant is longer than {MAX_TENANT_BYTES} bytes"
        if len(request.cache_salt.encode()) > MAX_CACHE_SALT_BYTES:
            return f"cache_salt is longer than {MAX_CACHE_SALT_BYTES} bytes"
        if len(request.fork_group.encode()) > MAX_FORK_GROUP_BYTES:
            return f"fork_group is longer than {MAX_FORK_GROUP_BYTES} bytes"
        if len(request.adapter_id.encode()) > MAX_ADAPTER_ID_BYTES:
            return f"adapter_id is longer than {MAX_ADAPTER_ID_BYTES} bytes"
        if request.session is not None and (problem := request.session.problem):
            return problem
        whole = config.max_num_batched_tokens if config.keeps_pictures_whole else None
        if request.extras and (problem := extras_problem(request.extras, len(prompt), whole)):
            return problem
        return config.requirements_problem(request.requirements)

    def _check_load(self, request: Request) -> None:
        """Raises Refused if a limit of the queue would be exceeded; an empty queue takes any."""
        config, waiting, tenant = self._config, self._waiting, request.tenant
        total = Load(len(waiting), waiting.num_tokens)
        own = waiting.load_of(tenant)
        self.reservations.advance(request.arrival_s)
        is_reserved = self.reservations.is_due(request.request_id)
        reserved = Load() if is_reserved else self.reservations.due
        own_reserved = Load() if is_reserved else self.reservations.due_of(tenant)
        num_tokens, room = request.num_tokens, 1
        if config.policy is Policy.FAIR and not own.num_sequences:
            room, reserved = ROOM_OF_NEWCOMERS, Load()
        problem = _excess(
            "",
            total,
            reserved,
            num_tokens,
            room * config.max_waiting_requests,
            room * config.max_waiting_tokens,
        ) or _excess(
            f" of tenant {tenant!r}",
            own,
            own_reserved,
            num_tokens,
            config.max_waiting_requests_per_tenant,
            config.max_waiting_tokens_per_tenant,
        )
        if problem:
            self.num_refused += 1
            raise Refused(RefusalKind.OVERLOADED, problem)
        if is_reserved:
            self.reservations.keep(request.request_id)

    def num_ahead(self, request: Request) -> int:
        """Number of admissions until there is room in the queue for a refused request."""
        config, waiting = self._config, self._waiting
        total, own = Load(len(waiting), waiting.num_tokens), waiting.load_of(request.tenant)
        num_tokens = request.num_tokens
        ahead = 1
        for load, max_requests, max_tokens in (
            (total, config.max_waiting_requests, config.max_waiting_tokens),
            (own, config.max_waiting_requests_per_tenant, config.max_waiting_tokens_per_tenant),
        ):
            share = len(waiting) / max(load.num_sequences, 1)  # others are admitted in between
            if max_requests:
                ahead = max(ahead, round(share * (load.num_sequences + 1 - max_requests)))
            if max_tokens and load.num_tokens:
                excess = (load.num_tokens + num_tokens - max_tokens) / load.num_tokens
                ahead = max(ahead, round(share * load.num_sequences * excess))
        return ahead + len(self.reservations)


def _excess(
    whose: str, load: Load, reserved: Load, num_tokens: int, max_requests: int, max_tokens: int
) -> str | None:
    """Why a queue has no room for one more request; None when it has.

    Reserved places are kept free, but never more than half of all: reservations that no request
    comes back for must not leave the worker idle.
    """
    if not load.num_sequences:
        return None
    num_kept = min(reserved.num_sequences, max_requests // 2)
    if max_requests and load.num_sequences + num_kept >= max_requests:
        kept = f" and {num_kept} places are reserved" if num_kept else ""
        return f"{load.num_sequences} requests{whose} wait{kept}, at most {max_requests} may"
    num_kept = min(reserved.num_tokens, max_tokens // 2)
    if max_tokens and load.num_tokens + num_kept + num_tokens > max_tokens:
        kept = f" and places for {num_kept} are reserved" if num_kept else ""
        return (
            f"{load.num_tokens} tokens{whose} wait{kept}: with {num_tokens} more they would exceed "
            f"the {max_tokens} that may"
        )
    return None
