"""Dockerfiles as data: stages and their instructions, with the variables of ARG filled in."""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "deploy" / "images"
NAMES = ("gateway", "scheduler", "worker-cpu", "worker-cuda")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S+))?\s+")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; `text` is what follows its flags."""

    name: str
    flags: dict[str, str]
    text: str

    @property
    def words(self) -> list[str]:
        """Its arguments: of the exec form, or as a shell splits them."""
        if self.text.startswith("["):
            return [str(word) for word in json.loads(self.text)]
        return shlex.split(self.text)


@dataclass(slots=True)
class Stage:
    """The lines after one FROM."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def all_of(self, name: str) -> list[Instruction]:
        """Its instructions of one kind."""
        return [each for each in self.instructions if each.name == name]

    def last(self, name: str) -> Instruction:
        """The one that counts."""
        return self.all_of(name)[-1]

    @property
    def variables(self) -> dict[str, str]:
        """Its ENV and the defaults of its ARG."""
        pairs = [word for each in self.all_of("ARG") + self.all_of("ENV") for word in each.words]
        return dict(pair.split("=", 1) for pair in pairs)


def read(name: str) -> dict[str, Stage]:
    """The stages of an image's Dockerfile, by name, in their order."""
    return parse((IMAGES / name / "Dockerfile").read_text())


def parse(text: str) -> dict[str, Stage]:
    """The stages of a Dockerfile."""
    stages: dict[str, Stage] = {}
    arguments: dict[str, str] = {}
    stage: Stage | None = None
    for instruction in _instructions(text):
        if instruction.name == "FROM":
            base, _, name = instruction.text.partition(" AS ")
            for key, value in arguments.items():
                base = base.replace(f"${{{key}}}", value)
            stage = stages[name] = Stage(base, name)
        elif stage is None:
            arguments.update(pair.split("=", 1) for pair in instruction.words)
        else:
            stage.instructions.append(instruction)
    return stages


def _instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    found = []
    for line in filter(str.strip, joined.splitlines()):
        name, rest = line.strip().split(maxsplit=1)
        flags = {}
        while name != "HEALTHCHECK" and (match := _FLAG.match(rest)):
            flags[match[1]] = match[2] or ""
            rest = rest[match.end() :]
        found.append(Instruction(name, flags, rest))
    return found
