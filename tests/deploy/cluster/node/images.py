"""Images by their names: what they run by themselves, by their Dockerfiles, with which variables.

Their content is one environment with the package's wheel, at the place that images have it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.deploy import roots
from tests.deploy.images.dockerfile import NAMES, read
from tests.packaging.wheels import Environment

LIBRARIES = "/opt/libraries"  # not where they are: a volume may hide that, as `/tmp` does
KERNELS = "/kernels"  # one cache for all workers: compiling takes longer than the rest of a start


class NoImage(Exception):
    """There is no image of this name."""


@dataclass(frozen=True, slots=True)
class Image:
    """The facts of an image that a kubelet needs."""

    entrypoint: tuple[str, ...]
    variables: dict[str, str]
    user: int
    group: int
    binds: dict[str, str]
    options: tuple[str, ...]  # in addition, of its own service and of no other command

    def line(self, command: Sequence[str], arguments: Sequence[str]) -> list[str]:
        """The words of a container; `command` stands for the entrypoint, if it has any."""
        words = [*(command or self.entrypoint)]
        # A chart names its service as the image does, but for the folder of the program.
        is_service = words[1:] == [*self.entrypoint[1:]]
        return [*words, *arguments, *(self.options if is_service else ())]


@dataclass(frozen=True, slots=True)
class Images:
    """All images of this repository, over one environment."""

    environment: Environment
    libraries: Path  # of other distributions; the environment's path has LIBRARIES
    kernels: Path  # a folder to which every user may write
    # Steps of a tiny model take no time. With this, streams last as long as those of a real one,
    # and the cores are free for what is tested.
    worker_options: tuple[str, ...] = ("--failpoint=slow@1:0.2",)

    def find(self, reference: str) -> Image:
        """The image of a reference such as registry/pagewire-gateway:0.1.0. Raises NoImage."""
        last = reference.partition("@")[0].rpartition("/")[2]
        named = last.partition(":")[0].removeprefix("pagewire-")
        if named not in NAMES:
            raise NoImage(f"no image {reference}: there are {', '.join(NAMES)}")
        stage = list(read(named).values())[-1]
        user, _, group = stage.last("USER").text.partition(":")
        binds = roots.base(with_programs=stage.base != "scratch")
        binds[str(self.environment.folder)] = "/opt/pagewire"
        binds[str(self.libraries)] = LIBRARIES
        is_worker = named.startswith("worker")
        binds |= {str(self.kernels): KERNELS} if is_worker else {}
        return Image(
            tuple(stage.last("ENTRYPOINT").words),
            stage.variables | ({"PAGEWIRE_CACHE": KERNELS} if is_worker else {}),
            int(user),
            int(group or user),
            binds,
            self.worker_options if is_worker else (),
        )
