"""Kernels compiled ahead: a mark says that all of it is there, and failures are no failure."""

import logging
import subprocess
import sys

import pytest
import torch

from worker_svc import compile_ahead
from worker_svc.compile_ahead import CompileAhead
from worker_svc.step import Limits

LIMITS = Limits(
    num_blocks=1,
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=128,
    vocab_size=100,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model's folder, with an empty cache of kernels and some device to compile for."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some device")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def ending(*codes: int) -> "list[subprocess.Popen[bytes]]":
    return [subprocess.Popen([sys.executable, "-c", f"exit({code})"]) for code in codes]


def marks(folder) -> list[str]:
    return [path.name for path in (folder / "cache").glob("pagewire-*")]


def test_helpers_that_did_their_part_leave_a_mark_and_the_next_start_needs_none(folder):
    mark = folder / "cache" / f"pagewire-{compile_ahead._key(folder, torch.bfloat16, LIMITS)}"
    CompileAhead(ending(0, 0), mark).wait()
    assert marks(folder) == [mark.name]
    assert compile_ahead.start(folder, torch.bfloat16, LIMITS) is None


def test_a_helper_that_fails_leaves_no_mark_and_says_so(folder, caplog):
    with caplog.at_level(logging.WARNING):
        CompileAhead(ending(0, 3), folder / "cache" / "pagewire-x").wait()
    assert marks(folder) == []
    assert "1 of them failed" in caplog.text


def test_the_mark_is_for_one_model_type_and_set_of_limits(folder):
    def key(dtype=torch.bfloat16, **changes):
        limits = {name: getattr(LIMITS, name) for name in LIMITS.__slots__} | changes
        return compile_ahead._key(folder, dtype, Limits(**limits))

    same = key()
    assert key(num_blocks=4000) == same
    assert len({same, key(torch.float16), key(max_num_seqs=16), key(max_model_len=256)}) == 4
    (folder / "config.json").write_text('{"num_hidden_layers": 3}')
    assert key() != same
