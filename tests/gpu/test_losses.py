"""A worker ends itself if its device is lost or hangs; it continues after out-of-memory errors."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch

from tests.worker_svc.conftest import TIMEOUT_S, Attachment, Greedy, make_prompt, make_sequence
from tests.worker_svc.ranks.test_ranks import RankGroup, start_group
from tests.worker_svc.serving.test_service import generate
from worker_svc.device.device import end_if_lost

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

READY_S = 120  # kernels are compiled at the first start
PROMPTS = [make_prompt(length, seed=length) for length in (1, 16, 31)]
Start = Callable[..., RankGroup]


@pytest.fixture
def start(llama_folder: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts workers with one process on a GPU; kills processes that a test leaves."""
    started: list[RankGroup] = []

    def run(**changes: str) -> RankGroup:
        options = {"--device": "cuda", "--tensor-parallel-size": "1"}
        options |= {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        log_path = tmp_path / f"log-{len(started)}"
        started.append(start_group(llama_folder, log_path, options))
        wait_until_ready(started[-1])
        return started[-1]

    yield run
    for worker in started:
        worker.process.kill()
        worker.process.wait()


def wait_until_ready(worker: RankGroup) -> None:
    deadline_s = time.monotonic() + READY_S
    while "worker is READY" not in worker.log:
        assert worker.process.poll() is None, worker.log
        assert time.monotonic() < deadline_s, worker.log
        time.sleep(0.05)
    worker.port = int(worker.log.split("listening on 127.0.0.1:")[1].split()[0])


def decode_until_it_ends(attachment: Attachment) -> grpc.StatusCode:
    attachment.send(
        new_sequences=[make_sequence(0, make_prompt(20), [1, 2, 3])], slots=[0], num_scheduled=[20]
    )
    for step_id in range(2, 20):
        attachment.send(step_id=step_id, slots=[0])
    return attachment.status()


@pytest.mark.parametrize(
    ("failpoint", "code", "said"),
    [
        ("lose-device@3", 71, "device-side assert"),
        ("hang-device@3", 72, "has not ended within 2 s: this process ends with 72"),
    ],
)
def test_a_worker_whose_device_goes_ends_itself_and_the_next_one_computes(
    start: Start, greedy: Greedy, failpoint: str, code: int, said: str
) -> None:
    worker = start(failpoint=failpoint, step_limit_s="2")
    with worker.worker() as client:
        began_s = time.monotonic()
        assert decode_until_it_ends(client.attach()) is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began_s < 6
    assert worker.process.wait(TIMEOUT_S) == code
    assert said in worker.log
    calm = start()
    with calm.worker() as client:
        tokens = generate(client.attach(), PROMPTS, 8)
    assert tokens == [greedy(prompt, 8) for prompt in PROMPTS]


def test_a_device_that_is_out_of_memory_is_not_lost() -> None:
    device = torch.device("cuda")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(2**50, dtype=torch.uint8, device=device)
    end_if_lost(device, raised.value)
    assert torch.ones(3, device=device).sum() == 3
