"""`python -m gateway` as a process: start, ports, stop."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.forks import command
from tests.pace import paced, patience
from tests.ports import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[2]


class Forked:
    """A gateway that was forked, with the methods of a process of asyncio that tests use."""

    def __init__(self, started: command.Command) -> None:
        self._started, self.pid = started, started.pid
        self.terminate, self.kill = started.terminate, started.kill

    @property
    def returncode(self) -> int | None:
        return self._started.poll()

    async def wait(self) -> int:
        await self.communicate()  # closes the pipes
        return self._started.wait()

    async def communicate(self) -> tuple[bytes, bytes]:
        out, err = await asyncio.to_thread(self._started.communicate)
        return out.encode(), err.encode()


async def spawn(*options: str) -> Forked:
    started = await asyncio.to_thread(command.start, "gateway", options, ROOT, os.environ)
    return Forked(started)


async def spawn_anew(*options: str) -> asyncio.subprocess.Process:
    """As users start it."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *options, cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )


async def wait_until_ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(patience(15)):
        while True:
            try:
                if (await http.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


async def test_sigterm_lets_a_live_stream_end_and_exits_with_0(
    model_folder: Path, scheduler_server: Any, eventually: Any
) -> None:
    scheduler, address = scheduler_server
    scheduler.hangs_after = 1
    port = free_port()
    ports = ("--http-port", str(port), "--grpc-port", str(free_port()))
    process = await spawn_anew("--model", str(model_folder), "--scheduler", address, *ports)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=patience(10)
        ) as http:
            await wait_until_ready(http)
            body = {"prompt": "Hello", "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                assert (await anext(lines)).startswith("data: ")
                process.terminate()
                async with asyncio.timeout(patience(10)):
                    while (await http.get("/ready")).status_code == 200:
                        await asyncio.sleep(0.05)
                assert process.returncode is None
                refused = await http.post("/v1/completions", json=body)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                scheduler.finish_hanging()
                rest = [line async for line in lines if line]
                assert rest[-1] == "data: [DONE]"
        async with asyncio.timeout(patience(10)):
            _, log = await process.communicate()
        assert process.returncode == 0, log.decode()
        assert b"Traceback" not in log
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("taken", ["--http-port", "--grpc-port"])
async def test_a_port_in_use_is_named(taken: str, model_folder: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        ports = {"--http-port": "0", "--grpc-port": "0", taken: port}
        options = [text for pair in ports.items() for text in pair]
        process = await spawn("--model", str(model_folder), "--scheduler", "127.0.0.1:1", *options)
        async with asyncio.timeout(patience(20)):
            _, log = await process.communicate()
    assert process.returncode == 1
    assert f"127.0.0.1:{port}" in log.decode()
    assert "Traceback" not in log.decode()


async def test_a_parser_that_the_model_has_no_use_for_is_named(
    model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    options = ("--scheduler", "127.0.0.1:1", "--tool-call-parser", "hermes")
    process = await spawn("--model", str(tmp_path), *options)
    async with asyncio.timeout(patience(20)):
        _, log = await process.communicate()
    assert process.returncode == 1
    assert "--tool-call-parser hermes" in log.decode()
    assert "Traceback" not in log.decode()


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_replaced(process: Forked, before: list[int]) -> bool:
    """True if another child has the place of the first one, and the second one is there."""
    now = children_of(process.pid)
    return len(now) == 2 and before[0] not in now and before[1] in now


async def end_all(process: Forked) -> None:
    """Kills what a failed test has left of a supervisor and its children."""
    if process.returncode is None:
        for pid in children_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        await process.wait()


async def test_two_processes_serve_one_port_and_a_killed_one_is_replaced(
    model_folder: Path, scheduler_server: Any, eventually: Any
) -> None:
    _, address = scheduler_server
    port, grpc_port = free_port(), free_port()
    ports = ("--http-port", str(port), "--grpc-port", str(grpc_port))
    where = ("--model", str(model_folder), "--scheduler", address)
    process = await spawn(*where, *ports, "--processes", "2")
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=patience(10)) as http:
            await wait_until_ready(http)
        await eventually(lambda: len(listeners(port)) == 2, "two listen", timeout_s=patience(15))
        await eventually(
            lambda: len(listeners(grpc_port)) == 2, "both on gRPC", timeout_s=patience(15)
        )
        before = children_of(process.pid)
        assert len(before) == 2
        os.kill(before[0], signal.SIGKILL)

        await eventually(
            lambda: is_replaced(process, before), "a new child", timeout_s=patience(10)
        )
        await eventually(lambda: len(listeners(port)) == 2, "it listens", timeout_s=patience(15))
        answers = set()
        for _ in range(8):  # each on its own connection
            async with httpx.AsyncClient(base_url=url, timeout=patience(10)) as http:
                await wait_until_ready(http)
                answer = await http.post("/v1/completions", json={"prompt": "Hello"})
                answers.add(answer.json()["choices"][0]["text"])
        assert answers == {"Hello world"}
        process.terminate()
        async with asyncio.timeout(patience(15)):
            _, log = await process.communicate()
        assert process.returncode == 0, log.decode()
        assert b"ended with code -9" in log
        assert b"Traceback" not in log
    finally:
        await end_all(process)


async def test_one_of_several_that_hangs_is_replaced(
    model_folder: Path, scheduler_server: Any, eventually: Any
) -> None:
    _, address = scheduler_server
    port = free_port()
    where = ("--model", str(model_folder), "--scheduler", address, "--http-port", str(port))
    limits = ("--processes", "2", "--hang-timeout-s", str(paced(1.5)))
    process = await spawn(*where, "--grpc-port", str(free_port()), *limits)
    try:
        await eventually(lambda: len(listeners(port)) == 2, "two listen", timeout_s=patience(15))
        await asyncio.sleep(paced(1.5))  # both have shown that they live
        before = children_of(process.pid)
        os.kill(before[0], signal.SIGSTOP)

        await eventually(
            lambda: is_replaced(process, before), "a new child", timeout_s=patience(20)
        )
        process.terminate()
        async with asyncio.timeout(patience(15)):
            _, log = await process.communicate()
        assert process.returncode == 0, log.decode()
        assert b"gateway 0 hangs" in log or b"gateway 1 hangs" in log
        assert b"Traceback" not in log
    finally:
        await end_all(process)


def listeners(port: int) -> list[str]:
    """Sockets that listen on a port, as the kernel lists them."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                found.append(fields[9])
    return found


async def test_a_port_that_somebody_else_has_is_an_error_with_many_processes_too(
    model_folder: Path,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        where = ("--model", str(model_folder), "--scheduler", "127.0.0.1:1")
        process = await spawn(*where, "--http-port", str(port), "--processes", "2")
        async with asyncio.timeout(patience(15)):
            _, log = await process.communicate()
    assert process.returncode == 1
    assert f"127.0.0.1:{port}".encode() in log
    assert b"Traceback" not in log
