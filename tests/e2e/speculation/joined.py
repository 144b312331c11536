"""A scheduler's core and a worker's runner in one process: frames as on the wire, no clock."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pagewire.v1 import types_pb2, worker_pb2
from scheduler_svc.convert import to_logprobs, to_result, to_state, to_step
from scheduler_svc.core import (
    GRAMMAR,
    FinishReason,
    Request,
    Scheduler,
    SchedulerConfig,
    StepPlan,
)
from scheduler_svc.core.invariants import check_invariants
from scheduler_svc.core.step.plan import NO_DRAFTS
from scheduler_svc.sampling import resolve
from scheduler_svc.speculation.answered_step import AnsweredStep
from scheduler_svc.speculation.options import SpeculationOptions
from scheduler_svc.speculation.start import make_drafter
from scheduler_svc.worker.state_check import StateCheck
from worker_svc.config import WorkerConfig
from worker_svc.protocol.codec import decode_step, encode_output
from worker_svc.startup import startup

VOCAB_SIZE = 128
EOS = 2


@dataclass
class Told:
    """The output that a request has had."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Types:
    """The worker's options of these names."""

    dtype: str = "float32"
    kv_cache: str = "auto"
    rounding: str = "auto"


class Joined:
    """Serves requests until all have ended; steps take the time of their tokens' number."""

    def __init__(
        self,
        folder: Path,
        speculation: SpeculationOptions | None = None,
        *,
        num_blocks: int = 64,
        lookahead: int = 1,
        step_s: float = 0.01,
        draft_folder: Path | None = None,
        types: Types | None = None,
        **limits: object,
    ) -> None:
        types = types or Types()
        self._config = WorkerConfig(
            port=0,
            dtype=types.dtype,
            kv_cache_dtype=types.kv_cache,
            quantization=types.rounding,
            device="cpu",
            num_kv_blocks=num_blocks,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=192,
            draft_model=draft_folder,
            host_blocks=limits.get("num_host_blocks", 0),  # type: ignore[arg-type]
        )
        self._model = startup.load(self._config, folder, types.dtype, "")
        self.attention_backend = self._model.decoder.attention_backend
        self._runner = startup.build_runner(self._config, self._model, num_blocks=num_blocks)
        self.core = Scheduler(
            SchedulerConfig(
                num_blocks=num_blocks,
                block_size=self._config.block_size,
                max_num_seqs=8,
                max_num_batched_tokens=64,
                max_model_len=192,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=(EOS,),
                **limits,  # type: ignore[arg-type]
            )
        )
        self.drafter = None if speculation is None else make_drafter(speculation, self.core)
        self._state_check = StateCheck(self.core, 1)
        self._lookahead, self._step_s = lookahead, step_s
        self._answers: deque[tuple[StepPlan, worker_pb2.ModelRunnerOutput]] = deque()
        self.told: dict[int, Told] = defaultdict(Told)
        self.num_steps = 0

    def add(
        self, prompt: list[int], fork_group: str = "", tenant: str = "", **fields: object
    ) -> int:
        """Submits a request; returns its handle."""
        max_tokens = fields.pop("max_tokens", 40)
        params = types_pb2.SamplingParams(**fields)  # type: ignore[arg-type]
        handle = len(self.told)
        sampling = resolve(params, 1, VOCAB_SIZE)
        self.told[handle] = Told()
        self.core.add(
            Request(
                f"r{handle}",
                np.array(prompt, dtype=np.int32),
                max_tokens=int(max_tokens),  # type: ignore[call-overload]
                min_tokens=params.min_tokens,
                stop_token_ids=tuple(params.stop_token_ids),
                ignore_eos=params.ignore_eos,
                sampling=sampling,
                handle=handle,
                fork_group=fork_group,
                tenant=tenant,
                requirements=(GRAMMAR,) if sampling.grammar else (),
                skip_speculation=params.skip_speculation,
            )
        )
        return handle

    def run(self, max_steps: int = 2000) -> dict[int, Told]:
        """Serves up to so many steps, or until all requests have ended."""
        for _ in range(max_steps):
            while self.core.num_in_flight <= self._lookahead and self._send():
                pass
            if not self._answers:
                assert not any(self.core.live()), "stuck"
                break
            self._take()
        return self.told

    def kill_worker(self) -> None:
        """Loses the worker with all its steps in flight; an empty one takes its place."""
        self._answers.clear()
        config, count = self._config, self.core.config.num_blocks
        self._runner = startup.build_runner(config, self._model, num_blocks=count)
        self.core.worker_lost()
        self.core.worker_back()
        self._state_check = StateCheck(self.core, 1)

    def _send(self) -> bool:
        drafts = NO_DRAFTS if self.drafter is None else self.drafter.propose()
        if drafts is None:
            return False
        plan = self.core.schedule(None, drafts)
        if plan is None:
            return False
        step = to_step(plan, wants_state=self._state_check.wants(plan))
        frame = worker_pb2.AttachRequest(step=step).SerializeToString()
        output = self._runner.execute(decode_step(frame, self._runner.limits))
        answer = worker_pb2.AttachResponse.FromString(encode_output(output)).output
        assert not answer.error
        self._answers.append((plan, answer))
        self.num_steps += 1
        return True

    def _take(self) -> None:
        plan, answer = self._answers.popleft()
        self._state_check.compare(answer.step_id, to_state(answer))
        outputs, logprobs = self.core.update(to_result(answer)), to_logprobs(answer)
        if logprobs is not None and outputs.sampled_rows is not None:
            logprobs = logprobs.select(outputs.sampled_rows)
        for handle, token_id in zip(outputs.handles, outputs.token_ids, strict=True):
            self.told[handle].token_ids.append(int(token_id))
        if logprobs is not None:
            for row, logprob in zip(logprobs.rows, logprobs.logprobs, strict=True):
                self.told[outputs.handles[row]].logprobs.append(float(logprob))
        for finished in outputs.finished:
            self.told[finished.request.handle].reason = finished.reason
        if self.drafter is not None:
            seconds = self._step_s * (1 + 0.02 * plan.num_tokens)
            self.drafter.stepped(AnsweredStep(plan, seconds, seconds, len(outputs.token_ids)))
        check_invariants(self.core)
