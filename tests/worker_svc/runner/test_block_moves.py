"""KV blocks that move, to the host, back, or into each other; the tokens stay the same."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from tests.worker_svc.conftest import (
    WORKER_CONFIG,
    Greedy,
    Worker,
    make_prompt,
    make_sequence,
    serving,
)

PROMPT = make_prompt(37, seed=3)  # two full blocks and five tokens in a third


@pytest.fixture(scope="module")
def swapping_worker(llama_folder: Path) -> Iterator[Worker]:
    """A READY worker with six host blocks."""
    with serving(replace(WORKER_CONFIG, host_blocks=6), llama_folder) as ready:
        yield ready


def test_the_handshake_tells_the_host_blocks(swapping_worker: Worker, worker: Worker) -> None:
    assert swapping_worker.describe().description.num_host_blocks == 6
    assert worker.describe().description.num_host_blocks == 0


def test_a_swapped_sequence_goes_on_in_other_blocks(
    swapping_worker: Worker, greedy: Greedy
) -> None:
    expected, stranger = greedy(PROMPT, 8), make_prompt(40, seed=4)
    attachment = swapping_worker.attach()
    tokens = attachment.step(
        new_sequences=[make_sequence(0, PROMPT, [1, 2, 3])], slots=[0], num_scheduled=[37]
    )
    tokens += attachment.step(slots=[0])
    # Its blocks go to another sequence in the very step in which they are swapped out.
    others = attachment.step(
        freed_slots=[0],
        new_sequences=[make_sequence(1, stranger, [3, 1, 2])],
        swapped_out_block_ids=[1, 2, 3],
        to_host_block_ids=[5, 0, 2],
        slots=[1],
        num_scheduled=[40],
    )
    back = make_sequence(
        0, PROMPT + tokens, [7, 9, 8], num_prompt_tokens=37, num_computed_tokens=38
    )
    both = attachment.step(
        new_sequences=[back],
        from_host_block_ids=[5, 0, 2],
        swapped_in_block_ids=[7, 9, 8],
        slots=[1, 0],
    )
    others.append(both[0])
    tokens.append(both[1])
    for _ in range(5):
        both = attachment.step(same_rows=True)
        others.append(both[0])
        tokens.append(both[1])
    attachment.close()
    assert tokens == expected
    assert others == greedy(stranger, 7)


def test_a_sibling_takes_a_prompt_over_and_computes_its_last_token_alone(
    worker: Worker, greedy: Greedy
) -> None:
    attachment = worker.attach()
    attachment.step(
        new_sequences=[make_sequence(0, PROMPT, [1, 2, 3])], slots=[0], num_scheduled=[37]
    )
    first = greedy(PROMPT, 1)
    sibling = make_sequence(1, PROMPT, [1, 2, 4], num_computed_tokens=36)
    tokens = attachment.step(
        new_sequences=[sibling],
        copied_from_block_ids=[3],
        copied_to_block_ids=[4],
        slots=[0, 1],
    )
    rows = [[*first, tokens[0]], [tokens[1]]]
    for _ in range(4):
        for row, token in zip(rows, attachment.step(same_rows=True), strict=True):
            row.append(token)
    attachment.close()
    assert rows == [greedy(PROMPT, 6), greedy(PROMPT, 5)]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"swapped_out_block_ids": [1]}, "to_host_block_ids"),
        ({"swapped_out_block_ids": [1], "to_host_block_ids": [6]}, "to_host_block_ids"),
        ({"swapped_out_block_ids": [0], "to_host_block_ids": [1]}, "swapped_out_block_ids"),
        ({"swapped_out_block_ids": [1, 2], "to_host_block_ids": [1, 1]}, "to_host_block_ids"),
        ({"from_host_block_ids": [1, 2], "swapped_in_block_ids": [3, 3]}, "swapped_in_block_ids"),
        ({"from_host_block_ids": [-1], "swapped_in_block_ids": [3]}, "from_host_block_ids"),
        ({"copied_from_block_ids": [1], "copied_to_block_ids": [64]}, "copied_to_block_ids"),
        ({"copied_from_block_ids": [1, 2], "copied_to_block_ids": [3, 3]}, "copied_to_block_ids"),
        ({"copied_to_block_ids": [3]}, "copied_to_block_ids"),
    ],
)
def test_a_move_out_of_range_is_refused_by_name(
    swapping_worker: Worker, fields: dict[str, list[int]], name: str
) -> None:
    attachment = swapping_worker.attach()
    attachment.send(new_sequences=[make_sequence(0, PROMPT, [1, 2, 3])], **fields)
    assert attachment.status() is grpc.StatusCode.INVALID_ARGUMENT
    assert name in (attachment.call.details() or "")


def test_a_worker_without_host_blocks_refuses_to_swap(worker: Worker) -> None:
    attachment = worker.attach()
    attachment.send(swapped_out_block_ids=[1], to_host_block_ids=[0])
    assert attachment.status() is grpc.StatusCode.INVALID_ARGUMENT
