"""Files of blocks: one that does not fit exactly is a miss, never a wrong block."""

import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.pace import patience
from worker_svc.runner.block_files import BlockFiles, Full, NamedBlock, file_bytes, names_of

SIZE = 5_000
LAYOUT = b"layout of a test"
BLOCK = NamedBlock(2**64 - 1, 0, b"parent and tokens of it")
PAYLOAD = bytes(np.random.default_rng(7).integers(0, 256, SIZE, dtype=np.uint8))


def files(folder: Path, layout: bytes = LAYOUT, max_blocks: int = 100) -> BlockFiles:
    made = BlockFiles(folder, layout, SIZE, max_blocks)
    made.open()
    return made


def block(number: int) -> NamedBlock:
    return NamedBlock(number, 2**64 - number - 1, number.to_bytes(8, "little"))


def read(one: BlockFiles, named: NamedBlock = BLOCK) -> bytes | None:
    found = bytearray(SIZE)
    return bytes(found) if one.read(named, memoryview(found)) else None


@pytest.fixture
def written(tmp_path: Path) -> tuple[BlockFiles, Path]:
    one = files(tmp_path / "disk")
    one.write(BLOCK, memoryview(PAYLOAD))
    return one, tmp_path / "disk" / BLOCK.name


def test_a_block_is_read_back_by_another_process_and_by_no_other_user(
    written: tuple[BlockFiles, Path],
) -> None:
    one, path = written
    assert read(one) == PAYLOAD
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == [BLOCK.name], "nothing unfinished"
    other = BlockFiles(path.parent, LAYOUT, SIZE, 100)
    assert other.open().tolist() == [[2**64 - 1, 0]]
    assert read(other) == PAYLOAD


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _flip(at: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)

    return flip


def _largest_lengths(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[12:24] = b"\xff" * 12  # u32 bytes of content, u64 bytes of payload
    path.write_bytes(content)


def _of_another_model(path: Path) -> None:
    other = files(path.parent, b"another's layout")
    other.write(BLOCK, memoryview(bytes(SIZE)))


def _of_another_content(path: Path) -> None:
    """As if both 64-bit halves of a key were equal by chance, or by an attack."""
    other = files(path.parent)
    other.write(replace(BLOCK, content=b"parent and tokens of me"), memoryview(bytes(SIZE)))


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        _empty,
        _lengthen,
        *(_flip(at) for at in (0, 8, 12, 16, 24, 40, 48, 60, 80, 90, -SIZE, -1)),
        _largest_lengths,
        _of_another_model,
        _of_another_content,
    ],
)
def test_a_file_that_does_not_fit_is_a_miss_and_removed(
    written: tuple[BlockFiles, Path], damage: Callable[[Path], None]
) -> None:
    one, path = written
    damage(path)
    assert read(one) is None
    assert not path.exists() and len(one) == 0
    one.write(BLOCK, memoryview(PAYLOAD))
    assert read(one) == PAYLOAD


def test_what_is_no_file_is_a_miss_without_waiting(tmp_path: Path) -> None:
    one = files(tmp_path)
    os.mkfifo(tmp_path / BLOCK.name)  # to open it as a file would wait for a writer
    assert read(one) is None
    (tmp_path / block(1).name).mkdir()
    assert read(one, block(1)) is None
    (tmp_path / "elsewhere").write_bytes(b"secret")
    (tmp_path / block(2).name).symlink_to(tmp_path / "elsewhere")
    assert read(one, block(2)) is None
    assert (tmp_path / "elsewhere").read_bytes() == b"secret"
    assert len(BlockFiles(tmp_path, LAYOUT, SIZE, 100).open()) == 0


def test_the_blocks_used_longest_ago_make_room_at_a_start(tmp_path: Path) -> None:
    one = files(tmp_path)
    for number in range(6):
        one.write(block(number), memoryview(PAYLOAD))
        os.utime(tmp_path / block(number).name, (1_000 + number, 1_000 + number))
    assert read(one, block(0)) == PAYLOAD  # used just now
    found = BlockFiles(tmp_path, LAYOUT, SIZE, 3).open()
    assert found[:, 0].tolist() == [4, 5, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names_of(found))


def test_a_folder_never_has_more_blocks_than_it_may(tmp_path: Path) -> None:
    one = files(tmp_path, max_blocks=2)
    for number in (1, 2):
        one.write(block(number), memoryview(PAYLOAD))
    with pytest.raises(Full, match="holds 2 blocks"):
        one.write(block(3), memoryview(PAYLOAD))
    one.write(block(2), memoryview(PAYLOAD))  # anew
    one.remove([block(1).name, block(9).name])
    one.write(block(3), memoryview(PAYLOAD))
    assert len(list(tmp_path.iterdir())) == len(one) == 2


def test_a_folder_that_was_removed_is_made_again(written: tuple[BlockFiles, Path]) -> None:
    one, path = written
    path.unlink()
    path.parent.rmdir()
    assert read(one) is None
    one.write(BLOCK, memoryview(PAYLOAD))
    assert read(one) == PAYLOAD


def test_two_processes_share_a_folder_and_neither_reads_a_wrong_block(tmp_path: Path) -> None:
    both = files(tmp_path), files(tmp_path)
    begun_s, problems = time.monotonic(), list[str]()
    payloads = {number: PAYLOAD[number:] + PAYLOAD[:number] for number in range(8)}

    def use(one: BlockFiles, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(300):
            number = int(rng.integers(8))
            match rng.integers(3):
                case 0:
                    one.write(block(number), memoryview(payloads[number]))
                case 1:
                    one.remove([block(number).name])
                case _:
                    found = read(one, block(number))
                    if found not in (None, payloads[number]):
                        problems.append(f"block {number}")

    threads = [threading.Thread(target=use, args=(both[i % 2], i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(60))
    assert not problems, f"after {time.monotonic() - begun_s} s"
    assert not any(path.name.endswith(".part") for path in tmp_path.iterdir())


def test_an_unfinished_file_goes_once_no_process_can_be_writing_it(tmp_path: Path) -> None:
    for name, age_s in (("new.part", 0), ("old.part", 7_200)):
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    files(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["new.part"]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = files(tmp_path)

    def fail(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="No space left"):
        one.write(BLOCK, memoryview(PAYLOAD))
    assert not list(tmp_path.iterdir()) and len(one) == 0


def test_what_a_block_takes_is_counted_in_pages() -> None:
    assert file_bytes(4096, 72) == 8192
    assert file_bytes(2_359_296, 72) % 4096 == 0
