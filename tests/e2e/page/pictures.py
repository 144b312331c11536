"""The pictures of the page in docs/: a demo of the default model under load, seen by Chromium.

    python -m tests.e2e.page.pictures [--folder docs]

Needs Chromium. A `pagewire up --demo` of its own runs meanwhile.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from bench.harness.services import ROOT
from pagewire.cli.launcher.services import LOOPBACK, free_ports
from tests.e2e.page.browser import Tab, browsing, find_browser

SIZE, PHONE = (1320, 840), (390, 844)
START_S = 300.0
GOOD = "document.querySelector('#lamp.good')"
ANSWERED = "document.querySelector('#stop').hidden && document.querySelector('.message.assistant')"
QUESTION = "What does a scheduler of a language-model server do? Answer in two sentences."
SETTINGS = json.dumps({"max_tokens": 90, "temperature": 0, "repetition_penalty": 1.1})
TOPICS = ("rivers", "bridges", "clocks", "maps", "winds", "glass", "trains", "islands")


@contextmanager
def demo() -> Iterator[str]:
    """The address of a running demo."""
    ports = free_ports(4)
    names = ("--http-port", "--grpc-port", "--scheduler-port", "--worker-port")
    where = [word for name, port in zip(names, ports, strict=True) for word in (name, str(port))]
    small = ("--kv-cache-gib", "0.2", "--max-num-seqs", "12", "--max-num-batched-tokens", "256")
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "pagewire", "up", "--demo", "--no-sample"]
        process = subprocess.Popen(
            [*command, *where, *small, "--log-dir", logs], cwd=ROOT, stdout=subprocess.DEVNULL
        )
        try:
            url, deadline_s = f"http://{LOOPBACK}:{ports[0]}/", time.monotonic() + START_S
            while time.monotonic() < deadline_s and process.poll() is None:
                with suppress(httpx.TransportError):
                    if httpx.get(f"{url}ready").is_success:
                        break
                time.sleep(0.3)
            yield url
        finally:
            process.terminate()
            time.sleep(1.0)
            process.terminate()  # at once: nothing that runs is wanted
            process.wait()


def ask(url: str, index: int) -> None:
    """One request of the load; shares the beginning of its prompt with the others."""
    words = "You are a patient teacher who explains the things of the world to children. " * 4
    topic = TOPICS[index % len(TOPICS)]
    body = {
        "prompt": f"{words}Tell me about {topic}. " + f"More about {topic}! " * (index % 5 * 12),
        "max_tokens": 120 + 20 * (index % 4),
        "ignore_eos": True,
    }
    with suppress(httpx.TransportError):
        httpx.post(f"{url}v1/completions", json=body, timeout=None)


def load(url: str, until: threading.Event) -> None:
    """Requests that come one after the other, until the event is set."""
    for index in range(10_000):
        threading.Thread(target=ask, args=(url, index), daemon=True).start()
        if until.wait(0.9):
            return


def save(tab: Tab, path: Path) -> None:
    """Writes a picture."""
    tab.picture(path)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


def take(tab: Tab, url: str, folder: Path) -> None:
    """All pictures."""
    tab.prefer("light")
    tab.resize(*SIZE)
    tab.open(url)
    tab.evaluate(f"localStorage.setItem('pagewire.settings', {json.dumps(SETTINGS)})")
    tab.open(f"{url}?chat")
    tab.until(GOOD)
    tab.click("#prompt")
    tab.type(QUESTION)
    tab.press("Enter")
    tab.until(ANSWERED)
    save(tab, folder / "page-chat-light.png")
    is_over = threading.Event()
    threading.Thread(target=load, args=(url, is_over), daemon=True).start()
    tab.click("#tab-system")
    time.sleep(25)
    save(tab, folder / "page-system-light.png")
    tab.prefer("dark")
    tab.click("#kill")
    tab.until("document.querySelector('#workers li').dataset.state === 'away'")
    tab.until(GOOD)
    time.sleep(4)
    save(tab, folder / "page-recovery-dark.png")
    tab.resize(*PHONE, scale=1.5, is_phone=True)
    time.sleep(1)
    save(tab, folder / "page-phone-dark.png")
    is_over.set()


def main() -> None:
    """Makes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    program = find_browser()
    if program is None:
        parser.error("Chromium is not installed")
    with demo() as url, browsing(program, 120.0) as tab:
        take(tab, url, options.folder)


if __name__ == "__main__":
    main()
