"""Follows a Dockerfile without a container engine: the same steps, in roots of their own.

A stage that builds runs in an overlay of this machine, with this Python in the place of the base
image's. The last stage is a folder with what it copies, and starts as a container does: another
user, this folder alone as its root, read-only. Needs root and overlayfs.

Left out: packages of apt (this machine's programs stand in for them), limits, a network of its own.
"""

import fnmatch
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.deploy import roots
from tests.deploy.images.dockerfile import ROOT, Instruction, Stage
from tests.pace import patience
from tests.test_repository import files, relative

IN_IMAGE = sysconfig.get_path("purelib", vars={"base": "/usr/local"})
# What an engine gives to every container.
GIVEN = ("/etc/hosts", "/etc/resolv.conf", "/dev", "/proc")
# What a stage that builds sees of this machine besides its root, by where. The pip is that of the
# tests, which is newer: an old one takes half its time to choose among all wheels of an index.
BUILDING = {
    str(roots.PYTHON): "/usr/local",
    str(Path(sysconfig.get_path("purelib")) / "pip"): f"{IN_IMAGE}/pip",
    "/proc": "/proc",
    "/dev": "/dev",
}
STEP_S = 900.0


def why_not() -> str:
    """The parts that this machine lacks; empty if none."""
    if os.geteuid() != 0:
        return "no root: stages cannot have roots of their own"
    tried = subprocess.run(["unshare", "-m", "true"], capture_output=True)
    return "no mount namespaces" if tried.returncode else ""


def context() -> list[str]:
    """The repository's files that a build gets to see, by .dockerignore."""
    lines = [
        line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and line[0] != "#"
    ]
    return sorted(name for path in files() if not _is_ignored(name := relative(path), lines))


def _is_ignored(name: str, lines: Sequence[str]) -> bool:
    ignored = False
    for line in lines:
        pattern = line.removeprefix("!")
        parts = PurePosixPath(name)
        if pattern.startswith("**/"):
            matches = any(fnmatch.fnmatch(part, pattern[3:]) for part in parts.parts)
        else:
            above = [str(parts), *map(str, parts.parents)][:-1]
            matches = any(fnmatch.fnmatch(path, pattern) for path in above)
        if matches:
            ignored = not line.startswith("!")
    return ignored


@dataclass(slots=True)
class Replay:
    """The stages of one Dockerfile in `folder`, each made when it is asked for.

    `cache` has what stages of all files wrote that begin alike, as a builder's has.
    """

    stages: dict[str, Stage]
    folder: Path
    cache: dict[str, Path] = field(default_factory=dict)
    made: dict[str, Path] = field(default_factory=dict)

    def stage(self, name: str) -> Path:
        """The folder with all that this stage wrote; it is only read."""
        if name not in self.made:
            stage = self.stages[name]
            # What a stage takes from another one is not in its text.
            is_whole = not any("from" in step.flags for step in stage.instructions)
            is_whole = is_whole and stage.base not in self.stages
            key = repr(stage) if is_whole else str(self.folder / name)
            if key not in self.cache:
                self.cache[key] = self._make(name, stage)
            self.made[name] = self.cache[key]
        return self.made[name]

    def _make(self, name: str, stage: Stage) -> Path:
        written = self.folder / name
        if stage.base in self.stages:
            subprocess.run(["cp", "-al", self.stage(stage.base), written], check=True)
        else:
            written.mkdir(parents=True)
        _Steps(self, stage, written).follow()
        return written

    def shell(self, name: str) -> list[str]:
        """The shell that runs the steps of a stage."""
        stage = self.stages[name]
        if own := stage.all_of("SHELL"):
            return own[-1].words
        return self.shell(stage.base) if stage.base in self.stages else ["/bin/sh", "-c"]

    def inherited(self, name: str) -> dict[str, str]:
        """Variables of a stage and of those it builds upon."""
        stage = self.stages[name]
        below = self.inherited(stage.base) if stage.base in self.stages else {}
        return below | stage.variables


class _Steps:
    """The steps of one stage."""

    def __init__(self, replay: Replay, stage: Stage, written: Path) -> None:
        self._replay, self._stage, self._written = replay, stage, written
        self._folder = "/"

    def follow(self) -> None:
        if self._stage.base in self._replay.stages:
            self._folder = self._replay.stages[self._stage.base].last("WORKDIR").text
        for step in self._stage.instructions:
            match step.name:
                case "WORKDIR":
                    self._folder = step.text
                    self._inside(step.text).mkdir(parents=True, exist_ok=True)
                case "COPY" if "from" in step.flags:
                    self._copy_from(step)
                case "COPY":
                    self._copy(step)
                case "RUN" if "apt-get" not in step.text:
                    self._run(step)

    def _inside(self, path: str) -> Path:
        return self._written / os.path.join(self._folder, path).lstrip("/")

    def _copy(self, step: Instruction) -> None:
        *sources, target = step.words
        for name in context():
            if "." in sources or name in sources:
                copy = self._inside(target) / (name if "." in sources else Path(name).name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy)

    def _copy_from(self, step: Instruction) -> None:
        source, target = step.words
        origin = self._replay.stage(step.flags["from"]) / source.strip("/")
        copy = self._inside(target.rstrip("/") or "/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        # As COPY does: the content of a folder, into a folder.
        subprocess.run(["cp", "-al", "--no-target-directory", origin, copy], check=True)
        if owner := step.flags.get("chown"):
            subprocess.run(["chown", "--recursive", owner, copy], check=True)

    def _run(self, step: Instruction) -> None:
        """Runs it in an overlay of this machine. Its secret is this machine's pip configuration."""
        work, root = (self._replay.folder / f"{self._stage.name}.{kind}" for kind in ("w", "m"))
        for folder in (work, root):
            folder.mkdir(exist_ok=True)
        layers = f"lowerdir=/,upperdir={self._written},workdir={work}"
        command = [*self._replay.shell(self._stage.name), step.text]
        pip = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
        variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root"}
        variables |= pip | self._replay.inherited(self._stage.name)
        # Of the thousands of files that libraries bring, few are imported here.
        variables["PIP_COMPILE"] = "0"
        in_namespace(
            [
                ["mount", "-t", "overlay", "overlay", "-o", layers, str(root)],
                *roots.bound(root, BUILDING),
            ],
            ["chroot", str(root), "/usr/bin/env", "-C", self._folder, *command],
            variables,
        )


@dataclass(frozen=True, slots=True)
class Container:
    """The last stage of a Dockerfile, ready to start."""

    root: Path
    stage: Stage

    def command(
        self, *arguments: str, volumes: Mapping[Path, str], entrypoint: Sequence[str] | None = None
    ) -> list[str]:
        """A command that becomes the container's process, with a read-only root.

        Writable are /tmp and the cache; `volumes` are folders of this machine, read-only, by where
        they appear.
        """
        user = self.stage.last("USER").text
        words = self.stage.last("ENTRYPOINT").words if entrypoint is None else entrypoint
        binds = {path: path for path in GIVEN}
        if self.stage.base != "scratch":
            binds |= roots.base(with_programs=True)
        binds |= {str(folder): where for folder, where in volumes.items()}
        uid = user.partition(":")[0]
        steps = [
            ["mount", "--bind", str(self.root), str(self.root)],
            *roots.bound(self.root, binds),
        ]
        for path in ("/tmp", "/cache"):
            (self.root / path[1:]).mkdir(exist_ok=True)
            where = str(self.root / path[1:])
            options = f"uid={uid},gid={uid},mode=700"
            steps.append(["mount", "-t", "tmpfs", "tmpfs", "-o", options, where])
        steps.append(["mount", "-o", "remount,bind,ro", str(self.root)])
        line = ["chroot", f"--userspec={user}", str(self.root), *words, *arguments]
        return roots.command(steps, line)

    @property
    def variables(self) -> dict[str, str]:
        """Its environment."""
        return self.stage.variables


def container(replay: Replay) -> Container:
    """The image that a build without --target gives."""
    name = list(replay.stages)[-1]
    return Container(replay.stage(name), replay.stages[name])


def in_namespace(
    steps: Sequence[Sequence[str]], command: Sequence[str], variables: Mapping[str, str]
) -> None:
    """Runs `command` after `steps` in a mount namespace of its own."""
    ran = subprocess.run(
        roots.command(steps, command),
        env=dict(variables),
        capture_output=True,
        text=True,
        timeout=patience(STEP_S),
    )
    assert ran.returncode == 0, f"{command[-1]}\n{ran.stdout[-2000:]}{ran.stderr[-4000:]}"
