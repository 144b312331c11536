"""The chart in a cluster, by a real helm: it serves, it is upgraded under load, it goes.

Streams of all kinds run while pods are replaced; each text must equal that of the same request
undisturbed. The tests are one story, in order, of one release.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deploy.cluster.site import Release
from tests.deploy.cluster.standin import Client, StandIn, Tools
from tests.e2e.failures.twins import Seen, TwinRequest, Verdict, asks
from tests.pace import patience

pytestmark = pytest.mark.slow
NUM_OF_EACH = 5  # one of each kind over HTTP, and one through the SDK
# A stream must outlast the wait before a pod's SIGTERM, however fast the machine is.
# Steps of the stand-in's workers take 0.2 s each; elsewhere there are as many as it takes.
NUM_TOKENS, MOST_TOKENS, LEAST_S = 25, 1_600, 5.0
MOST_TURNS = 4  # of an upgrade, until one met streams
SMALL = {
    "gateway": {"replicas": 2, "preStopSeconds": 1},
    "longestGenerationSeconds": 300,
    "worker": {
        "drainSeconds": 2,
        "shmSize": "64Mi",
        "options": {"dtype": "float32", "threads": 1, "kv-cache-gib": 0.3},
    },
}

# By tier: whose log says that it ended while streams ran, and how.
MET = {
    "gateway": ("gateway", r"stopping: [1-9]\d* requests are open"),
    "scheduler": ("scheduler", r"stopping: [1-9]\d* requests are open"),
    "worker": ("scheduler", "gets no new requests: the worker is shutting down"),
}


def _values(folder: Path, more: dict[str, object]) -> tuple[str, str]:
    """The values as words of helm's command line."""
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(SMALL | more))
    return "--values", str(path)


def _real(tools: Tools, home: Path) -> Release:
    registry = os.environ.get("PAGEWIRE_TEST_REGISTRY", "")
    if not registry:
        pytest.skip("KUBECONFIG is set, but PAGEWIRE_TEST_REGISTRY names no images")
    image = {"registry": registry, "tag": os.environ.get("PAGEWIRE_TEST_TAG", "")}
    client = Client(tools, Path(os.environ["KUBECONFIG"]), home)
    return Release(client, _values(home, {"image": image}), None)


def _stand_in(tools: Tools, home: Path, request: pytest.FixtureRequest) -> Release:
    folder: Path = request.getfixturevalue("served_model")
    source = {"hostPath": {"path": str(folder)}}
    volume = {"source": source, "path": "tiny", "shared": True}
    cluster: StandIn = request.getfixturevalue("cluster")
    values = _values(home, {"model": {"source": "volume", "volume": volume}})
    return Release(Client(tools, cluster.kubeconfig, home), values, cluster)


@pytest.fixture(scope="module")
def release(
    tools: Tools, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Release]:
    """The release, not installed yet; without a trace after the tests."""
    home = tmp_path_factory.mktemp("home")
    is_real = "KUBECONFIG" in os.environ
    made = _real(tools, home) if is_real else _stand_in(tools, home, request)
    made.install()
    yield made
    made.client.helm("uninstall", made.name, "--namespace", made.namespace)


@dataclass(frozen=True, slots=True)
class Twins:
    """The streams of a round, and what each says undisturbed."""

    requests: list[TwinRequest]
    seen: list[Seen]


@pytest.fixture(scope="module")
def twins(release: Release) -> Twins:
    release.wait_until_answered()
    num_tokens = NUM_TOKENS
    while True:
        requests = asks(NUM_OF_EACH, num_tokens)
        began_s = time.monotonic()
        seen = release.run(requests)
        wall_s = time.monotonic() - began_s
        assert [one.problem for one in seen if one.problem] == []
        is_long = wall_s >= LEAST_S
        assert is_long or release.stand_in is None, f"{num_tokens} steps took {wall_s:.1f} s"
        if is_long or num_tokens == MOST_TOKENS:
            return Twins(requests, seen)
        num_tokens = min(int(num_tokens * 1.2 * LEAST_S / wall_s), MOST_TOKENS)


def disturb(release: Release, twins: Twins, change: Callable[[], object]) -> int:
    """Makes a change while streams run, one round after the other; returns the number of rounds.

    Asserts that each stream of each round equals its twin.
    """
    failed: list[BaseException] = []

    def make() -> None:
        try:
            change()
        except BaseException as error:
            failed.append(error)

    maker = threading.Thread(target=make)
    num_rounds = 0
    streams = release.start(twins.requests)
    streams.wait_until_all_have_begun()
    maker.start()
    while True:
        is_last = not maker.is_alive()  # one more round after the change
        seen = streams.wait()
        num_rounds += 1
        wrong = {
            number: (one.judge(twin), one.problem)
            for number, (one, twin) in enumerate(zip(seen, twins.seen, strict=True))
            if one.judge(twin) is not Verdict.SAME
        }
        assert not wrong, f"round {num_rounds}: {wrong}\n{release.words()}"
        if is_last:
            break
        streams = release.start(twins.requests)
    maker.join(patience(180))
    assert not failed, failed
    return num_rounds


def names(release: Release, tier: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in release.pods(tier)}


def wait_until_gone(release: Release, tier: str, before: set[str]) -> None:
    """Waits for the end of pods that have been replaced: an upgrade waits for their successors."""
    deadline_s = time.monotonic() + patience(60)
    while before & names(release, tier):
        assert time.monotonic() < deadline_s, "pods that were not replaced"
        time.sleep(0.1)


def test_a_prompt_is_answered_through_the_service(release: Release) -> None:
    answer = release.answer("The capital of France is", 5)
    assert answer["usage"]["completion_tokens"] == 5 and answer["choices"][0]["text"]


def test_helm_test_passes(release: Release) -> None:
    said = release.helm("test", "--logs")
    assert "Succeeded" in said
    (pod,) = release.pods("test")
    assert release.logs(pod["metadata"]["name"]).strip()  # the tokens


@pytest.mark.parametrize("tier", ["gateway", "scheduler", "worker"])
def test_a_rolling_upgrade_of_a_tier_loses_no_stream(
    release: Release, twins: Twins, tier: str
) -> None:
    witness, words = MET[tier]
    said = ""
    for turn in range(MOST_TURNS):
        before = names(release, tier)
        annotation = f"{tier}.podAnnotations.turn=t{turn}"
        rounds = disturb(release, twins, partial(release.upgrade, annotation))
        print(f"{tier}: {rounds} rounds of {2 * NUM_OF_EACH} streams")
        assert before
        wait_until_gone(release, tier, before)
        if release.stand_in is None:
            return
        # An upgrade between two rounds meets no stream, and shows nothing.
        said = release.words_of(witness)
        if re.search(words, said):
            return
    pytest.fail(said)


def test_a_second_worker_takes_load_and_goes_without_a_loss(release: Release, twins: Twins) -> None:
    disturb(release, twins, lambda: release.upgrade("worker.replicas=2"))
    assert len(release.pods("worker")) == 2
    disturb(release, twins, lambda: None)
    if release.stand_in is not None:
        counts = {p["metadata"]["name"]: num_tokens(p) for p in release.pods("worker")}
        assert all(counts.values()), counts
    disturb(release, twins, lambda: release.upgrade("worker.replicas=1"))
    assert len(release.pods("worker")) == 1


def num_tokens(pod: dict[str, object]) -> float:
    """Tokens that a worker has computed, by its metrics."""
    status = pod["status"]
    assert isinstance(status, dict)
    url = f"http://{status['podIP']}:9464/metrics"
    lines = httpx.get(url, timeout=patience(10)).text.splitlines()
    found = [line.split() for line in lines if line.startswith("pagewire_worker_step_tokens_total")]
    return sum(float(parts[-1]) for parts in found)


def test_a_rollback_brings_back_what_was(release: Release, twins: Twins) -> None:
    first = release.get("deployment", f"{release.name}-pagewire-gateway")
    waits = ("--wait", "--timeout", f"{patience(180):.0f}s")
    disturb(release, twins, lambda: release.helm("rollback", "1", *waits))
    back = release.get("deployment", f"{release.name}-pagewire-gateway")
    assert "annotations" not in back["spec"]["template"]["metadata"]
    assert first["metadata"]["uid"] == back["metadata"]["uid"]


def test_uninstalled_it_leaves_nothing(release: Release) -> None:
    release.helm("uninstall", "--wait", "--timeout", f"{patience(180):.0f}s")
    if release.stand_in is not None:
        stand_in = release.stand_in
        # The pod of `helm test` stays, as a hook does; it has ended.
        stand_in.wait_for(
            lambda: (
                {p["status"]["phase"] for p in stand_in.pods(release.namespace)} <= {"Succeeded"}
            ),
            "end of all pods",
        )
        stand_in.wait_for(lambda: not stand_in.processes(), "end of all processes")
    left = release.get("statefulsets,deployments,services,secrets,configmaps")["items"]
    # What the chart keeps on purpose says so.
    unkept = [
        obj["metadata"]["name"]
        for obj in left
        if obj["metadata"].get("annotations", {}).get("helm.sh/resource-policy") != "keep"
        and obj["metadata"]["name"] != "kube-root-ca.crt"
    ]
    assert unkept == []
