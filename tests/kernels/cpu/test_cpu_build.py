"""Build of the C kernels: choice of instruction set and compiler, content of the cache."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.cpu import build, isa
from kernels.cpu.library import SOURCE, load
from tests.pace import patience

PATH = "/usr/local/bin:/usr/bin:/bin"
AVX512 = "avx2 fma f16c avx512f avx512bw avx512dq avx512vl"
needs_compiler = pytest.mark.skipif(
    not build.can_compile({"PATH": PATH}), reason="there is no C compiler"
)


def test_an_instruction_set_that_is_not_here_is_refused_by_name() -> None:
    here = ", ".join(one.name for one in isa.available())
    with pytest.raises(isa.UnknownISA, match=f"'sse9' is none of what this machine has: {here}"):
        load(torch.float32, {"PAGEWIRE_CPU_ISA": "sse9"})
    for one in isa.ISAS:
        if one not in isa.available():
            with pytest.raises(isa.UnknownISA, match=f"'{one.name}' is none of"):
                load(torch.float32, {"PAGEWIRE_CPU_ISA": one.name})


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", "fpu sse2", "plain"),
        ("x86_64", "avx avx2", "plain"),
        ("x86_64", "avx2 fma f16c", "avx2"),
        ("x86_64", "avx2 fma f16c avx512f", "avx2"),
        ("x86_64", AVX512, "avx512"),
        ("x86_64", f"{AVX512} avx512_bf16", "avx512"),
        ("x86_64", f"{AVX512} avx512_bf16 avx512_vnni", "avx512bf16"),
        ("aarch64", "fp asimd", "neon"),
        ("aarch64", "fp asimd asimddp", "dotprod"),
        ("riscv64", "", "plain"),
    ],
)
def test_the_best_that_a_machine_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str, features: str, expected: str
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    name = "Features" if machine == "aarch64" else "flags"
    cpuinfo.write_text(f"processor\t: 0\n{name}\t\t: {features}\n\nprocessor\t: 1\n")
    monkeypatch.setattr(isa, "CPUINFO", cpuinfo)
    monkeypatch.setattr(isa.platform, "machine", lambda: machine)
    assert isa.candidates({})[0].name == expected
    assert isa.candidates({"PAGEWIRE_CPU_ISA": "plain"})[0].name == "plain"


def test_switched_off_or_without_a_type_there_is_no_library() -> None:
    assert load(torch.float32, {"PAGEWIRE_CPU_KERNELS": "0"}) is None
    assert load(torch.float64, {}) is None


def test_without_a_compiler_there_is_no_library(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(torch.float32, {"PATH": str(tmp_path), "PAGEWIRE_CACHE": str(tmp_path)}) is None
    assert list(tmp_path.iterdir()) == []
    assert "no C compiler `cc`" in caplog.text
    assert "apt-get install gcc" in caplog.text


def test_a_compiler_that_fails_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no luck >&2\nexit 1\n')
    broken.chmod(0o755)
    cache = tmp_path / "cache"
    environment = {"CC": str(broken), "PATH": PATH, "PAGEWIRE_CACHE": str(cache)}
    assert load(torch.float32, environment) is None
    assert list((cache / "kernels").iterdir()) == []
    with pytest.raises(build.BuildFailed, match="no luck"):
        build.library(SOURCE, [], build.Toolchain.find(environment))


@needs_compiler
def test_an_instruction_set_that_the_compiler_does_not_know_gives_way_to_the_next(
    tmp_path: Path,
) -> None:
    best, *others = isa.available()
    if not others:
        pytest.skip("plain C is all that this machine has")
    old = tmp_path / "cc"
    refused = [flag for flag in best.flags if flag not in others[0].flags]
    tests = " ".join(f'*" {flag} "*) exit 1;;' for flag in refused)
    old.write_text(f'#!/bin/sh\ncase " $* " in {tests} esac\nexec cc "$@"\n')
    old.chmod(0o755)
    found = load(torch.float32, {"CC": str(old), "PATH": PATH, "PAGEWIRE_CACHE": str(tmp_path)})
    assert found is not None
    assert found.isa == (others[0].name if refused else best.name)


@needs_compiler
def test_another_source_type_or_compiler_is_another_library(tmp_path: Path) -> None:
    toolchain = replace(build.Toolchain.find({"PATH": PATH}), cache=tmp_path)
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return X; }\n")
    first = build.library(source, ["-DX=1"], toolchain)
    assert build.library(source, ["-DX=1"], toolchain) == first
    assert build.library(source, ["-DX=2"], toolchain) != first
    source.write_text("int two(void) { return X; }\n")
    assert build.library(source, ["-DX=1"], toolchain) != first


@needs_compiler
def test_processes_that_build_at_once_all_get_the_library(tmp_path: Path) -> None:
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }\n")
    compiler = tmp_path / "cc"  # one that compiles waits for the other one
    compiler.write_text(
        f"""#!/bin/sh
case "$1" in -std=*) touch {tmp_path}/began-$$
for i in $(seq 9999); do
[ "$(ls {tmp_path} | grep -c began)" = 2 ] && break; sleep 0.02
done ;; esac
exec cc "$@"
"""
    )
    compiler.chmod(0o755)
    openmp = build.Toolchain.find({"PATH": PATH}).openmp
    program = f"""
from pathlib import Path
from kernels.cpu import build
folder = Path({str(tmp_path)!r})
toolchain = build.Toolchain(str(folder / "cc"), Path({str(openmp)!r}), folder / "all")
assert build.library(folder / "one.c", [], toolchain).exists()
"""
    environment = {"PATH": PATH, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    started = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(2)]
    assert [process.wait(timeout=patience(300)) for process in started] == [0, 0]
    assert len(list(tmp_path.glob("began-*"))) == 2
    assert [path.suffix for path in (tmp_path / "all").iterdir()] == [".so"]
