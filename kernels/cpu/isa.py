"""Instruction sets for which the C kernels can be compiled, and those of this machine.

Each is defined by explicit compiler flags, never by -march=native: a library compiled for AVX2 is
the same on every machine. Independent of dtypes and sources.
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
VARIABLE = "PAGEWIRE_CPU_ISA"

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (
    *_AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mprefer-vector-width=512",
)
_AVX2_NEEDS = frozenset({"avx2", "fma", "f16c"})
_AVX512_NEEDS = _AVX2_NEEDS | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_X86: tuple[str, ...] = ("x86_64", "amd64")
_ARM: tuple[str, ...] = ("aarch64", "arm64")


class UnknownISA(ValueError):
    """The requested instruction set does not exist, or not on this machine."""


@dataclass(frozen=True, slots=True)
class ISA:
    """An instruction set: compiler flags, and the machines and CPU features that it requires."""

    name: str
    flags: tuple[str, ...]
    machines: tuple[str, ...]  # names of platform.machine(); empty: any
    needs: frozenset[str] = frozenset()  # names in /proc/cpuinfo

    def runs_on(self, machine: str, features: frozenset[str]) -> bool:
        """True if a machine of this kind with these CPU features can run it."""
        return (not self.machines or machine in self.machines) and self.needs <= features


# In descending order of speed.
ISAS = (
    ISA(
        "avx512bf16",
        (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
        _X86,
        _AVX512_NEEDS | {"avx512_bf16", "avx512_vnni"},
    ),
    ISA("avx512", _AVX512, _X86, _AVX512_NEEDS),
    ISA("avx2", (*_AVX2, "-mprefer-vector-width=256"), _X86, _AVX2_NEEDS),
    ISA("dotprod", ("-march=armv8.2-a+dotprod",), _ARM, frozenset({"asimddp"})),
    ISA("neon", (), _ARM),
    ISA("plain", ("-DPLAIN",), ()),
)


def available() -> tuple[ISA, ...]:
    """Instruction sets of this machine, fastest first; always includes plain C."""
    machine, features = platform.machine().lower(), cpu_features()
    return tuple(isa for isa in ISAS if isa.runs_on(machine, features))


def candidates(environment: Mapping[str, str]) -> tuple[ISA, ...]:
    """The instruction set named by PAGEWIRE_CPU_ISA, or else all of this machine, fastest first.

    Raises UnknownISA.
    """
    found = available()
    name = environment.get(VARIABLE, "")
    if not name:
        return found
    named = tuple(isa for isa in found if isa.name == name)
    if not named:
        raise UnknownISA(
            f"{VARIABLE}: {name!r} is none of what this machine has: "
            + ", ".join(isa.name for isa in found)
        )
    return named


def cpu_features() -> frozenset[str]:
    """CPU features that Linux reports; empty on other systems."""
    if not CPUINFO.exists():
        return frozenset()
    for line in CPUINFO.read_text().splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(values.split())
    return frozenset()
