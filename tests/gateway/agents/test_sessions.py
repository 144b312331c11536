"""Whole sessions of agents: no refusal, no lost call, and nearly all of each prompt cached.

The scheduler is the real one. Its worker has no model: it writes what the story says, in the form
of the model's family.
"""

import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from default_model.folder import ensure
from gateway.tokens.tokenizer import Tokenizer
from simulator.workers.fake_worker import FakeModel
from tests.gateway.agents.model_families import FAMILIES, Family
from tests.gateway.agents.sessions import CLIENTS, COMPACTED, QUESTION, Answer, Client, Step, story
from tests.gateway.conftest import Running, end_gateway, run_gateway, until_ready
from tests.scheduler_svc.conftest import cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEAST_CACHED = 0.95
ALL_SESSIONS = "PAGEWIRE_ALL_SESSIONS" in os.environ
END = "<|im_end|>"  # by which each family's answers end here


@dataclass(slots=True)
class Script:
    """The tokens that the worker writes for the next request; a request is known by its seed."""

    token_ids: list[int] = field(default_factory=list)
    begun: dict[int, tuple[int, list[int]]] = field(default_factory=dict)  # first place, tokens

    def token_at(
        self, seed: NDArray[np.uint64], position: NDArray[np.int64], vocab_size: int
    ) -> NDArray[np.int32]:
        pairs = zip(seed.tolist(), position.tolist(), strict=True)
        return np.array([self._token_at(one, at) for one, at in pairs], np.int32)

    def _token_at(self, seed: int, position: int) -> int:
        first, token_ids = self.begun.setdefault(seed, (position, self.token_ids))
        return token_ids[min(position - first, len(token_ids) - 1)]


@dataclass(slots=True)
class Stage:
    """A gateway with a real scheduler and a worker that follows the script."""

    running: Running
    family: Family
    script: Script
    encode: Callable[[str], list[int]]

    async def turn(self, client: Client, step: Step) -> Answer:
        """One request at a step of the story, whole or streamed by turns."""
        text = self.family.answer(step.thought, step.text, step.calls)
        if step.is_cut:
            text = text[: text.rindex("src/")]
        self.script.token_ids = self.encode(text + END)
        body = client.body(step.number)
        is_streamed = step.number % 2 == 1
        if not is_streamed:
            body.pop("stream_options", None)
        asked = body | {"stream": is_streamed}
        answered = await self.running.http.post(client.route, json=asked)
        assert answered.status_code == 200, (step.number, answered.text)
        if not is_streamed:
            return client.read(answered.json())
        lines = [line for line in answered.text.splitlines() if line.startswith("data: {")]
        return client.read_events([json.loads(line.removeprefix("data: ")) for line in lines])


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FAMILIES, ids=lambda f: f.name)
async def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    family: Family = request.param
    folder = tmp_path_factory.mktemp(family.name) / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ensure() / name, folder)
    (folder / "chat_template.jinja").write_text(family.template)
    tokenizer = Tokenizer.from_folder(folder)
    encode = tokenizer._tokenizer.encode
    (end_id,) = encode(END).ids
    script = Script()
    patch = pytest.MonkeyPatch()
    patch.setattr("simulator.workers.slots.token_at", script.token_at)
    model = FakeModel(
        num_blocks=8192,
        block_size=8,
        max_num_seqs=8,
        max_model_len=32768,
        vocab_size=tokenizer.vocab_size + 10,
        eos_token_ids=(end_id,),
    )
    async with cluster(model, max_num_seqs=8) as made:
        server = made.scheduler, f"127.0.0.1:{made.scheduler_port}"
        running = await run_gateway(folder, tokenizer, server)
        await until_ready(running)
        yield Stage(running, family, script, lambda text: encode(text).ids)
        await end_gateway(running)
    patch.undo()


@pytest.mark.parametrize("kind", CLIENTS, ids=lambda kind: kind.name)
async def test_a_session_runs_to_its_end(kind: type[Client], stage: Stage) -> None:
    if not ALL_SESSIONS and (CLIENTS.index(kind) - FAMILIES.index(stage.family)) % len(FAMILIES):
        pytest.skip("each client meets one family: PAGEWIRE_ALL_SESSIONS=1")
    client = kind()
    client.ask("Please look at the code.")
    for step in story():
        if step.number in QUESTION:
            client.ask(f"And what of {step.number}?")
        answer = await stage.turn(client, step)
        if step.is_cut:
            assert [name for name, _ in answer.calls] == [name for name, _ in step.calls]
        else:
            assert answer.calls == list(step.calls)
        if step.number:
            assert answer.cached_share >= LEAST_CACHED, (step.number, answer.usage)
        client.go_on(step, answer)
    assert len(client.turns) > COMPACTED // 2
