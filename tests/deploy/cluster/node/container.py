"""One container: a process as PID 1 of its namespace, with the pod's network and its own root."""

import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy import roots
from tests.deploy.cluster.api.store import Object
from tests.deploy.cluster.node.fields import expand
from tests.deploy.cluster.node.images import Image

_POLL_S = 0.02
# Its full path: the variables, PATH among them, are the container's.
_NSENTER = shutil.which("nsenter") or "nsenter"


class CannotStart(Exception):
    """The pod asks for what a kubelet refuses."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Surroundings that containers of one pod share."""

    folder: Path
    volumes: dict[str, Path]
    namespaces: int  # the process that holds the pod's network and host name
    groups: tuple[int, ...]


@dataclass(slots=True)
class Container:
    """One run of a container."""

    spec: Object
    image: Image
    variables: dict[str, str]
    around: Surroundings
    root: Path
    log: Path
    started_s: float = field(default_factory=time.monotonic)
    _process: "subprocess.Popen[bytes] | None" = None
    _pid: int | None = None

    def start(self) -> None:
        """Starts it. Raises CannotStart."""
        line = roots.command(self._steps(), self._line(), "--pid", "--fork", "--kill-child=SIGKILL")
        with self.log.open("ab") as said:
            self._process = subprocess.Popen(
                [*self._enter(), *line],
                env=self.variables,
                stdout=said,
                stderr=said,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.started_s = time.monotonic()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; a signal is 128 and its number."""
        assert self._process is not None
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def pid(self) -> int | None:
        """Its first process, as this machine sees it."""
        if self._pid is None and self._process is not None:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
            try:
                found = children.read_text().split()
            except OSError:
                return None
            self._pid = int(found[0]) if found else None
        return self._pid

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to its first process, which may ignore it."""
        if self.exit_code is None and (pid := self.pid) is not None:
            subprocess.run(["kill", f"-{number.value}", str(pid)], capture_output=True)

    def kill(self) -> None:
        """Ends all of its processes at once."""
        assert self._process is not None
        while self.exit_code is None:
            self.send(signal.SIGKILL)
            if self.pid is None:  # it has not begun
                self._process.kill()
            try:
                self._process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue

    def run(self, words: list[str], timeout_s: float) -> int | None:
        """Runs a command in it; returns its status, None if it took longer."""
        if (pid := self.pid) is None:
            return None
        user, group = self._user
        line = [_NSENTER, "--target", str(pid), "--mount", "--pid", "--net", "--uts", "--root"]
        line += [f"--setgid={group}", f"--setuid={user}", *words]
        try:
            ran = subprocess.run(
                line, env=self.variables, capture_output=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            return None
        return ran.returncode

    def end(self, grace_s: float, address: str) -> None:
        """preStop, SIGTERM, and SIGKILL when the time is up."""
        deadline_s = time.monotonic() + grace_s
        if (handler := self.spec.get("lifecycle", {}).get("preStop")) and self.exit_code is None:
            self._handle(handler, address, deadline_s)
        self.send(signal.SIGTERM)
        while self.exit_code is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        self.kill()

    def _handle(self, handler: Object, address: str, deadline_s: float) -> None:
        left_s = max(0.0, deadline_s - time.monotonic())
        if "sleep" in handler:
            time.sleep(min(left_s, float(handler["sleep"]["seconds"])))
        elif "exec" in handler:
            status = self.run(handler["exec"]["command"], left_s)
            with self.log.open("a") as said:
                said.write("" if status == 0 else f"preStop ended with {status}\n")
        else:
            raise CannotStart(f"preStop of a kind that this cluster has not: {', '.join(handler)}")

    def _enter(self) -> list[str]:
        pid = str(self.around.namespaces)
        return [_NSENTER, "--target", pid, "--net", "--uts"]

    @property
    def _user(self) -> tuple[int, int]:
        context = self.spec.get("securityContext", {})
        user = int(context.get("runAsUser", self.image.user))
        group = int(context.get("runAsGroup", self.image.group))
        if user == 0 and context.get("runAsNonRoot"):
            raise CannotStart("container has runAsNonRoot and image will run as root")
        return user, group

    def _line(self) -> list[str]:
        known = self.variables
        command = [expand(word, known) for word in self.spec.get("command", [])]
        arguments = [expand(word, known) for word in self.spec.get("args", [])]
        user, group = self._user
        groups = ",".join(map(str, (group, *self.around.groups)))
        return [
            *("chroot", f"--userspec={user}:{group}", f"--groups={groups}", str(self.root)),
            *self.image.line(command, arguments),
        ]

    def _steps(self) -> list[list[str]]:
        """Mounts that make its root, from outside of it."""
        self._fill_root()
        etc = self.around.folder / "etc"
        binds = self.image.binds | {"/dev": "/dev"}
        binds |= {str(path): f"/etc/{path.name}" for path in sorted(etc.iterdir())}
        steps = [
            ["mount", "--bind", str(self.root), str(self.root)],
            *roots.bound(self.root, binds),
        ]
        for mount in sorted(self.spec.get("volumeMounts", []), key=lambda m: str(m["mountPath"])):
            source = self.around.volumes[mount["name"]] / mount.get("subPath", "")
            steps += roots.bound(self.root, {str(source): mount["mountPath"]})
            if mount.get("readOnly"):
                where = str(self.root / mount["mountPath"].lstrip("/"))
                steps.append(["mount", "-o", "remount,bind,ro", where])
        steps.append(["mount", "-t", "proc", "proc", str(self.root / "proc")])
        if self.spec.get("securityContext", {}).get("readOnlyRootFilesystem"):
            steps.append(["mount", "-o", "remount,bind,ro", str(self.root)])
        return steps

    def _fill_root(self) -> None:
        """Fills in an image's content, in addition to what is mounted."""
        for name in ("proc", "tmp", "cache"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        (self.root / "tmp").chmod(0o1777)
        shutil.chown(self.root / "cache", self.image.user, self.image.group)
