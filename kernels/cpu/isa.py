"""The instruction sets that the C kernels are compiled for, and which of them this machine has.

Each is named by explicit flags of the compiler, never by what the compiler finds: a library that
was compiled for AVX2 is the same wherever it is compiled. Knows no dtypes and no source.
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
    """An instruction set was asked for that there is not, or not here."""


@dataclass(frozen=True, slots=True)
class ISA:
    """One instruction set: what compiles for it, and what a machine must have to run that."""

    name: str
    flags: tuple[str, ...]
    machines: tuple[str, ...]  # any, if empty
    needs: frozenset[str] = frozenset()  # as /proc/cpuinfo calls them

    def runs_on(self, machine: str, features: frozenset[str]) -> bool:
        """Whether a machine of this kind with these features has all that is needed."""
        return (not self.machines or machine in self.machines) and self.needs <= features


# The best first.
ISAS = (
    ISA("avx512bf16", (*_AVX512, "-mavx512bf16"), _X86, _AVX512_NEEDS | {"avx512_bf16"}),
    ISA("avx512", _AVX512, _X86, _AVX512_NEEDS),
    ISA("avx2", (*_AVX2, "-mprefer-vector-width=256"), _X86, _AVX2_NEEDS),
    ISA("neon", (), _ARM),
    ISA("plain", ("-DPLAIN",), ()),
)


def available() -> tuple[ISA, ...]:
    """Those that this machine can run, the best first; plain C is always among them."""
    machine, features = platform.machine().lower(), cpu_features()
    return tuple(isa for isa in ISAS if isa.runs_on(machine, features))


def candidates(environment: Mapping[str, str]) -> tuple[ISA, ...]:
    """The one that PAGEWIRE_CPU_ISA names, else all that this machine can run, the best first.

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
    """What Linux says that the CPU has, and lets programs use; nothing where it says nothing."""
    if not CPUINFO.exists():
        return frozenset()
    for line in CPUINFO.read_text().splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(values.split())
    return frozenset()
