"""Adapters through the whole path: named at start or loaded later, asked for as models.

The oracle is a model of transformers with the adapter merged into its weights.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from openai import OpenAI
from transformers import AutoModelForCausalLM, PreTrainedModel

import pagewire
from tests.e2e.conftest import SMALL, Product
from tests.pace import patience
from tests.worker_svc.adapters.peft_folders import MadeAdapter, continued

PROMPT = "Once upon a time there was a ship that"
NUM_TOKENS = 16
MADE = {
    "sailor": MadeAdapter(seed=1),
    "pilot": MadeAdapter(("q_proj", "v_proj"), rank=16, is_rank_stabilized=True, seed=2),
    "cook": MadeAdapter(("down_proj", "up_proj"), rank=4, seed=3),
}


@dataclass(frozen=True, slots=True)
class Crew:
    """The running product, its adapters' folders, and the text of each by its merged model."""

    product: Product
    folders: dict[str, Path]
    texts: dict[str, str]

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.product.url}/v1", api_key="none", max_retries=0)

    def complete(self, model: str) -> str:
        done = self.openai.completions.create(
            model=model,
            prompt=PROMPT,
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert done.model == model
        return done.choices[0].text

    def stream(self, model: str, on_token: Callable[[str], object]) -> str:
        """The text of a longer output, whose pieces are told as they come."""
        pieces = []
        stream = self.openai.completions.create(
            model=model,
            prompt=PROMPT,
            max_tokens=200,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for event in stream:
            if event.choices and (text := event.choices[0].text):
                if not pieces:
                    on_token(text)
                pieces.append(text)
        return "".join(pieces)

    def kill_worker(self) -> None:
        self.product.kill_worker()
        self.product.start_worker()

    def unload_cook(self) -> None:
        assert self.post("/v1/unload_lora_adapter", {"lora_name": "cook"})[0] == 200

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        answer = self.product.post(path, body)
        return answer.status_code, answer.text


@pytest.fixture(scope="module")
def crew(terse_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(terse_model).float().eval()
    root = tmp_path_factory.mktemp("adapters")
    folders = {name: made.save(base, root / name) for name, made in MADE.items()}
    modules = ("--lora-modules", f"sailor={folders['sailor']}")
    other = json.dumps({"name": "pilot", "path": str(folders["pilot"])})
    options = (*SMALL, *modules, "--lora-modules", other, "--max-loras", "2")
    environ = {"PAGEWIRE_ALLOW_RUNTIME_LORA_UPDATING": "true"}
    logs = tmp_path_factory.mktemp("logs")
    with Product(terse_model, logs, options, environ=environ) as product:
        product.start()
        with product.sdk() as client:
            ids = list(client.tokenize(PROMPT))
            models = {"": base} | {name: made.merged(base) for name, made in MADE.items()}
            texts = {
                name: client.detokenize(continued(model, ids, NUM_TOKENS))
                for name, model in models.items()
            }
        assert len({*texts.values()}) == len(texts)
        yield Crew(product, folders, texts)


def test_each_api_serves_an_adapter_as_a_model(crew: Crew) -> None:
    base, *others = crew.openai.models.list().data
    assert [(one.id, one.model_extra["parent"]) for one in others if one.model_extra] == [
        ("sailor", base.id),
        ("pilot", base.id),
    ]
    assert crew.openai.models.retrieve("pilot").id == "pilot"
    assert crew.complete(base.id) == crew.texts[""]
    assert crew.complete("sailor") == crew.texts["sailor"]
    assert crew.complete("pilot") == crew.texts["pilot"]
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
    answers = [
        crew.openai.chat.completions.create(model=name, **chat).choices[0].message.content
        for name in (base.id, "sailor", "pilot")
    ]
    assert len({*answers}) == len(answers)
    status, text = crew.post("/v1/messages", {"model": "sailor", **chat})
    message = json.loads(text)
    assert (status, message["model"]) == (200, "sailor")
    assert [block["text"] for block in message["content"]] == [answers[1]]
    response = crew.openai.responses.create(
        model="pilot", input=PROMPT, max_output_tokens=16, temperature=0
    )
    assert response.model == "pilot"
    with crew.product.sdk() as client:
        greedy = pagewire.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        assert client.generate(PROMPT, greedy, model="sailor").text == crew.texts["sailor"]
    listed = json.loads(
        crew.product.grpcurl(
            crew.product.grpc_port, "pagewire.v1.InferenceService/ListModels", data={}
        )
    )
    assert [one.get("parent", "") for one in listed["models"]] == ["", base.id, base.id]


def test_an_adapter_is_loaded_asked_for_at_once_and_unloaded(crew: Crew) -> None:
    status, text = crew.post(
        "/v1/load_lora_adapter", {"lora_name": "cook", "lora_path": str(crew.folders["cook"])}
    )
    assert (status, text) == (200, "Success: LoRA adapter 'cook' added successfully.")
    assert crew.complete("cook") == crew.texts["cook"]
    taken = {"lora_name": "cook", "lora_path": str(crew.folders["pilot"])}
    status, text = crew.post("/v1/load_lora_adapter", taken)
    assert status == 400
    assert "has already been loaded" in text
    with ThreadPoolExecutor(12) as pool:  # three adapters, of which a step may have two
        names = ["cook", "sailor", "pilot", "tiny"] * 3
        assert list(pool.map(crew.complete, names)) == [
            crew.texts.get(name, crew.texts[""]) for name in names
        ]
    status, text = crew.post("/v1/unload_lora_adapter", {"lora_name": "cook"})
    assert (status, text) == (200, "Success: LoRA adapter 'cook' removed successfully.")
    with pytest.raises(Exception, match="'cook' is not served here"):
        crew.complete("cook")
    status, text = crew.post("/v1/unload_lora_adapter", {"lora_name": "cook"})
    assert status == 404
    assert "The lora adapter 'cook' cannot be found." in text


def test_a_bad_adapter_is_refused_by_name_and_disturbs_nothing(crew: Crew, tmp_path: Path) -> None:
    status, text = crew.post(
        "/v1/load_lora_adapter", {"lora_name": "ghost", "lora_path": str(tmp_path / "nowhere")}
    )
    assert status == 400
    assert "is no folder" in text
    status, text = crew.post("/v1/load_lora_adapter", {"lora_name": "ghost"})
    assert status == 400
    assert "lora_path: must be given" in text
    assert crew.complete("sailor") == crew.texts["sailor"]


def test_a_worker_that_dies_in_the_middle_and_an_unload_in_the_middle_change_no_text(
    crew: Crew,
) -> None:
    loaded = {"lora_name": "cook", "lora_path": str(crew.folders["cook"])}
    assert crew.post("/v1/load_lora_adapter", loaded)[0] == 200
    names = ["cook", "sailor", "pilot", "tiny"]
    whole = [crew.stream(name, on_token=lambda _: None) for name in names]
    tokens: Queue[str] = Queue()

    def begun() -> None:
        for _ in names:
            tokens.get(timeout=patience(60))

    for disturb in (crew.kill_worker, crew.unload_cook):
        with ThreadPoolExecutor(len(names)) as pool:
            calls = [pool.submit(crew.stream, name, tokens.put) for name in names]
            begun()
            disturb()
            assert [call.result(timeout=patience(120)) for call in calls] == whole
    with pytest.raises(Exception, match="'cook' is not served here"):
        crew.complete("cook")


def test_adapters_outlive_the_scheduler_and_the_worker(crew: Crew) -> None:
    loaded = {"lora_name": "cook", "lora_path": str(crew.folders["cook"])}
    assert crew.post("/v1/load_lora_adapter", loaded)[0] == 200
    for service in ("scheduler_svc", "worker_svc"):
        crew.product.processes[service].kill()
        crew.product.processes[service].wait()
        if service == "scheduler_svc":
            crew.product.start_scheduler()
        else:
            crew.product.start_worker()
        crew.product.wait_until_ready()
        for name in ("cook", "sailor", "pilot"):
            assert crew.complete(name) == crew.texts[name]
    assert crew.post("/v1/unload_lora_adapter", {"lora_name": "cook"})[0] == 200


def test_ranks_read_an_adapter_once_it_has_a_place(
    crew: Crew, terse_model: Path, tmp_path: Path
) -> None:
    """Two ranks, and one place: each adapter waits for the other one's requests to end."""
    modules = [f"{name}={folder}" for name, folder in crew.folders.items()]
    ranks = ("--tensor-parallel-size", "2", "--max-loras", "1")
    options = (*SMALL, *ranks, *(word for one in modules for word in ("--lora-modules", one)))
    with Product(terse_model, tmp_path, options) as product:
        product.start()
        divided = Crew(product, crew.folders, crew.texts)
        with ThreadPoolExecutor(8) as pool:
            names = ["sailor", "pilot", "cook", "tiny"] * 2
            assert list(pool.map(divided.complete, names)) == [
                crew.texts.get(name, crew.texts[""]) for name in names
            ]
