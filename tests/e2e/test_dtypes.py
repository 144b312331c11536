"""`pagewire up --once` answers in every dtype, with every instruction set, without a compiler."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagewire.cli.launcher.sample import MAX_SAMPLE_TOKENS, QUESTION
from tests.e2e.conftest import ROOT, environment_of_users
from tests.pace import patience
from tests.ports import free_port

pytestmark = pytest.mark.slow
DTYPES = ("float32", "bfloat16", "float16")
# Each instruction set with one dtype; float32, which transformers checks, where every machine has
# it. PAGEWIRE_ALL_DTYPES=1 runs all pairs, as CI does: 6 s for each.
PAIRS = {
    "avx512bf16": "bfloat16",
    "avx512": "float32",
    "avx2": "float16",
    "dotprod": "bfloat16",
    "neon": "float16",
    "plain": "float32",
}
CASES = [
    (name, dtype)
    for name in PAIRS
    for dtype in DTYPES
    if dtype == PAIRS[name] or os.environ.get("PAGEWIRE_ALL_DTYPES")
]
PORTS = ("--http-port", "--grpc-port", "--scheduler-port", "--worker-port")
SMALL = ("--device", "cpu", "--num-kv-blocks", "64", "--max-model-len", "256")


def available() -> tuple[str, ...]:
    """Instruction sets of this host that the kernels support."""
    if importlib.util.find_spec("kernels.cpu.isa") is None:
        return ()
    return tuple(isa.name for isa in importlib.import_module("kernels.cpu.isa").available())


def answer(model: Path, dtype: str, **variables: str) -> str:
    """The answer of `pagewire up --once`; asserts that it succeeds."""
    command = [sys.executable, "-m", "pagewire", "up", "--once", "--model", str(model), *SMALL]
    command += ["--dtype", dtype, *(word for port in PORTS for word in (port, str(free_port())))]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment_of_users(**variables),
        capture_output=True,
        text=True,
        timeout=patience(180),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.partition(f"{QUESTION}\n")[2].partition("\nstopping\n")[0].strip()


@pytest.fixture(scope="module")
def expected(terse_model: Path) -> str:
    """The answer of transformers in float32."""
    tokenizer = AutoTokenizer.from_pretrained(terse_model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    theirs = AutoModelForCausalLM.from_pretrained(terse_model, dtype=torch.float32).eval()
    with torch.inference_mode():
        output = theirs.generate(**prompt, do_sample=False, max_new_tokens=MAX_SAMPLE_TOKENS)
    token_ids = output[0, prompt["input_ids"].shape[1] :]
    text = str(tokenizer.decode(token_ids, skip_special_tokens=True)).strip()
    return text.replace("\r\n", "\n")  # as lines of what was printed are read


def check(found: str, dtype: str, expected: str) -> None:
    """Asserts an answer, equal to that of transformers in float32."""
    assert found
    if dtype == "float32":
        assert found == expected


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_dtype_answers_with_every_instruction_set(
    terse_model: Path, expected: str, name: str, dtype: str
) -> None:
    if name not in available():
        pytest.skip(f"no {name} here")
    check(answer(terse_model, dtype, PAGEWIRE_CPU_ISA=name), dtype, expected)


@pytest.mark.parametrize("dtype", DTYPES if os.environ.get("PAGEWIRE_ALL_DTYPES") else ["bfloat16"])
def test_every_dtype_answers_without_a_compiler(
    terse_model: Path, expected: str, dtype: str
) -> None:
    check(answer(terse_model, dtype, PATH="", CC=""), dtype, expected)
