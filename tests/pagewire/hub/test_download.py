"""Models by name, from a stand-in of the hub: what is fetched, kept and refused."""

import json
from pathlib import Path

import pytest

from tests.pagewire.hub.conftest import Run
from tests.pagewire.hub.stand_in import Hub, Repository, commit_of

SMALL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "generation_config.json": b"{}",
}
WEIGHTS = b"0123456789abcdef" * (1 << 16)  # 1 MiB
UNUSED = {"README.md": b"read", "pytorch_model.bin": b"pickle", "onnx/model.safetensors": b"no"}
ONE_FILE = SMALL | UNUSED | {"model.safetensors": WEIGHTS}
SHARDS = {f"model-0000{number}-of-00002.safetensors": WEIGHTS[number:] for number in (1, 2)}
INDEX = json.dumps({"weight_map": {f"layer.{shard}": shard for shard in SHARDS}}).encode()
WITH_INDEX = SMALL | SHARDS | {"model.safetensors.index.json": INDEX}
SHARDED = WITH_INDEX | UNUSED | {"consolidated.safetensors": b"no"}


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def fetch(run: Run):
    def fetch_model(name: str, *options: str, **variables: str) -> Path:
        done = run("-m", "pagewire.hub", name, *options, **variables)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return Path(done.stdout.removesuffix("\n"))

    return fetch_model


@pytest.fixture
def refusal(run: Run):
    def refused_model(name: str, **variables: str) -> str:
        """The only line that is printed."""
        done = run("-m", "pagewire.hub", name, **variables)
        assert (done.returncode, done.stderr) == (1, ""), done.stdout + done.stderr
        (line,) = done.stdout.splitlines()
        return line

    return refused_model


def test_a_model_comes_with_what_is_served_of_it_and_nothing_else(hub: Hub, fetch) -> None:
    hub.repositories["org/one"] = Repository({"main": ONE_FILE})
    folder = fetch("org/one")
    assert content_of(folder) == SMALL | {"model.safetensors": WEIGHTS}
    assert folder.name == commit_of("main")
    hub.asked.clear()
    assert fetch("org/one") == folder
    assert hub.files == set()  # all from the cache


def test_a_gateway_fetches_no_weights(hub: Hub, fetch) -> None:
    hub.repositories["org/one"] = Repository({"main": ONE_FILE})
    assert content_of(fetch("org/one", "--without-weights")) == SMALL


def test_weights_in_several_files_are_those_of_the_index(hub: Hub, fetch) -> None:
    hub.repositories["org/shards"] = Repository({"main": SHARDED})
    assert content_of(fetch("org/shards")) == WITH_INDEX


def test_one_file_wins_over_an_index_which_is_not_fetched(hub: Hub, fetch) -> None:
    hub.repositories["org/both"] = Repository({"main": SHARDED | ONE_FILE})
    assert content_of(fetch("org/both")) == SMALL | {"model.safetensors": WEIGHTS}


def test_an_index_that_names_no_file_of_its_repository_is_refused(hub: Hub, refusal) -> None:
    index = json.dumps({"weight_map": {"layer": "../x.safetensors"}}).encode()
    files = SMALL | {"model.safetensors.index.json": index}
    hub.repositories["org/bad"] = Repository({"main": files})
    assert "layer is in '../x.safetensors', which names no .saf" in refusal("org/bad")


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, fetch, refusal) -> None:
    other = ONE_FILE | {"config.json": b'{"model_type": "other"}'}
    hub.repositories["org/one"] = Repository({"main": ONE_FILE, "refs/pr/1": other, "v2": other})
    for revision in ("v2", commit_of("v2"), "refs/pr/1"):
        config = (fetch(f"org/one@{revision}", "--without-weights") / "config.json").read_bytes()
        assert config == other["config.json"]
    assert refusal("org/one@v3") == f"org/one has no revision 'v3' at {hub.url}"


def test_offline_the_cache_is_enough_and_what_it_lacks_is_told(hub: Hub, fetch, refusal) -> None:
    hub.repositories["org/one"] = Repository({"main": ONE_FILE})
    offline = {"HF_HUB_OFFLINE": "1"}
    told = "HF_HUB_OFFLINE is set, and org/one is not, or not all, in the cache "
    assert refusal("org/one", **offline).startswith(told)
    fetch("org/one", "--without-weights")
    assert refusal("org/one", **offline).startswith(told)  # the weights are not
    folder = fetch("org/one")
    hub.asked.clear()
    assert fetch("org/one", **offline) == folder
    assert hub.asked == []


def test_without_network_the_cache_is_enough_and_the_address_is_named(
    hub: Hub, fetch, refusal
) -> None:
    hub.repositories["org/one"] = Repository({"main": ONE_FILE})
    folder = fetch("org/one")
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert fetch("org/one", **nowhere) == folder
    told = refusal("org/two", **nowhere)
    assert told.startswith("http://127.0.0.1:9 cannot be reached (")
    assert "and org/two is not, or not all, in the cache" in told
    hub.broken = 503
    assert fetch("org/one") == folder
    assert refusal("org/two") == f"{hub.url} answered 503 when asked for org/two"


def test_a_repository_that_does_not_exist_is_told_with_where_it_was_sought(
    hub: Hub, refusal
) -> None:
    told = refusal("org/none")
    assert told == (
        f"org/none is neither a folder here nor a repository that can be read at {hub.url}; a "
        "private one needs a token in the variable HF_TOKEN"
    )
    assert refusal("org/none", HF_TOKEN="hf_no") == (
        f"{told}, and the one that is there does not open it"
    )


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_model_needs_the_token_of_its_variable(
    status: int, hub: Hub, fetch, refusal
) -> None:
    hub.repositories["org/gated"] = Repository({"main": ONE_FILE}, "hf_yes", status)
    told = refusal("org/gated")
    assert told.startswith(f"org/gated is gated at {hub.url}: accept its terms there")
    assert told.endswith("into the variable HF_TOKEN")
    assert "the token in HF_TOKEN must be one that may" in refusal("org/gated", HF_TOKEN="hf_no")
    assert content_of(fetch("org/gated", HF_TOKEN="hf_yes")).keys() >= {"model.safetensors"}


@pytest.mark.parametrize(
    ("lacking", "told"),
    [
        ("config.json", "org/one holds no config.json"),
        ("tokenizer.json", "org/one holds no tokenizer.json"),
        (
            "model.safetensors",
            "org/one holds no model.safetensors and no model.safetensors.index.json: no others "
            "are read, and it has pytorch_model.bin",
        ),
    ],
)
def test_a_file_that_a_repository_lacks_is_named(
    lacking: str, told: str, hub: Hub, refusal
) -> None:
    files = {name: content for name, content in ONE_FILE.items() if name != lacking}
    hub.repositories["org/one"] = Repository({"main": files})
    assert refusal("org/one") == told


@pytest.mark.parametrize("tokenizer", ["tekken.json", "tiktoken.model"])
def test_another_tokenizer_comes_where_the_usual_one_is_not(
    tokenizer: str, hub: Hub, fetch
) -> None:
    files = {name: content for name, content in ONE_FILE.items() if name != "tokenizer.json"}
    hub.repositories["org/one"] = Repository({"main": files | {tokenizer: b"ranks"}})
    found = content_of(fetch("org/one"))
    assert found[tokenizer] == b"ranks" and "tokenizer.json" not in found
    hub.repositories["org/both"] = Repository({"main": ONE_FILE | {tokenizer: b"ranks"}})
    assert tokenizer not in content_of(fetch("org/both"))


def test_a_shard_that_a_repository_lacks_is_named(hub: Hub, refusal) -> None:
    lacking = "model-00002-of-00002.safetensors"
    files = {name: content for name, content in SHARDED.items() if name != lacking}
    hub.repositories["org/shards"] = Repository({"main": files})
    told = f"org/shards holds no {lacking}, which its model.safetensors.index.json names"
    assert refusal("org/shards") == told


def test_files_in_chunked_storage_come_over_plain_http_where_that_is_off(hub: Hub, fetch) -> None:
    chunked = Repository({"main": ONE_FILE}, has_xet=True)
    hub.repositories["org/one"] = chunked
    folder = fetch("org/one", HF_HUB_DISABLE_XET="1")
    assert content_of(folder) == SMALL | {"model.safetensors": WEIGHTS}
