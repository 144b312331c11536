"""Chromium without a window, driven over its own protocol through a pair of pipes.

No driver and no library: a message is JSON with a zero byte at its end. One tab; not thread-safe.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
POLL_S = 0.05
END_S = 10.0
_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb"),
)
# The browser reads from 3 and writes to 4.
_EXEC = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, " ": 32}
_SHIFT = 8

Json = dict[str, Any]


class BrowserFailed(RuntimeError):
    """Raised when the browser ended, refused a command, or the page threw an exception."""


def find_browser() -> str | None:
    """The program; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """The one tab, and what has happened in it."""

    def __init__(self, read_fd: int, write_fd: int, timeout_s: float) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._timeout_s = timeout_s
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[Json] = []

    # --- the protocol ----------------------------------------------------------------------------

    def send(self, method: str, **params: Any) -> Json:
        """The result of a command. Raises BrowserFailed."""
        self._number += 1
        message: Json = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write_fd, data) :]
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            answer = self._next(deadline_s)
            if answer.get("id") == self._number:
                break
            self.events.append(answer)
        if "error" in answer:
            raise BrowserFailed(f"{method}: {answer['error']['message']}")
        result: Json = answer["result"]
        return result

    def _next(self, deadline_s: float) -> Json:
        while b"\0" not in self._buffer:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._read_fd], [], [], left_s)[0]:
                raise BrowserFailed("the browser does not answer")
            data = os.read(self._read_fd, 1 << 20)
            if not data:
                raise BrowserFailed("the browser has ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        decoded: Json = json.loads(message)
        return decoded

    def attach(self) -> None:
        """Takes over a new tab and listens to its network, its console and its exceptions."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    # --- what a user does ------------------------------------------------------------------------

    def resize(self, width: int, height: int, *, scale: float = 1, is_phone: bool = False) -> None:
        """Sets the size of the window, in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale}
        self.send("Emulation.setDeviceMetricsOverride", **size, mobile=is_phone)

    def prefer(self, scheme: str) -> None:
        """The system's colours: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        """Goes to a page and waits until its modules have run."""
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, awaited. Raises BrowserFailed if it throws."""
        found = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise BrowserFailed(str(found["exceptionDetails"].get("exception", found)))
        return found["result"].get("value")

    def until(self, expression: str, timeout_s: float | None = None) -> None:
        """Waits until an expression is true, or an element. Raises BrowserFailed."""
        deadline_s = time.monotonic() + (timeout_s or self._timeout_s)
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > deadline_s:
                raise BrowserFailed(f"never true: {expression}\n{self.problems()}")
            time.sleep(POLL_S)

    def click(self, selector: str) -> None:
        """Presses the mouse in the middle of an element."""
        where = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'nearest'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            at = {"x": where[0], "y": where[1], "button": "left", "clickCount": 1}
            self.send("Input.dispatchMouseEvent", type=kind, **at)

    def type(self, text: str) -> None:
        """Puts text into what has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Presses and releases a key."""
        code = "Space" if key == " " else key
        more: Json = {"text": "\r" if key == "Enter" else key} if key in ("Enter", " ") else {}
        how = {"key": key, "code": code, "windowsVirtualKeyCode": _KEYS[key]}
        how["modifiers"] = _SHIFT if shift else 0
        self.send("Input.dispatchKeyEvent", type="keyDown", **how, **more)
        self.send("Input.dispatchKeyEvent", type="keyUp", **how)

    def picture(self, path: Path) -> None:
        """Writes what is seen, as PNG."""
        shot = self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    # --- what has happened -----------------------------------------------------------------------

    def requested(self) -> list[str]:
        """The addresses that the page has asked for."""
        self.evaluate("0")
        found = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in found]

    def problems(self) -> list[str]:
        """Exceptions that were not caught, and errors in the log; a policy's refusals are there."""
        self.evaluate("0")
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"].get("exception", params)))
            entry = params.get("entry", {}) if event.get("method") == "Log.entryAdded" else {}
            if entry.get("level") == "error":
                found.append(f"{entry['source']}: {entry['text']} ({entry.get('url')})")
        return found


@contextmanager
def browsing(program: str, timeout_s: float = 30.0) -> Iterator[Tab]:
    """A browser with one tab and a profile of its own, until the block ends."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(prefix="pagewire-browser-", ignore_cleanup_errors=True) as own:
        # Above 4, so that none is in the way of another.
        theirs = tuple(fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out))
        flags = [*_FLAGS, f"--user-data-dir={own}"]
        if os.geteuid() == 0:  # its sandbox needs another user
            flags.append("--no-sandbox")
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _EXEC, *map(str, theirs), program, *flags],
            pass_fds=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for fd in (theirs_in, theirs_out, *theirs):
            os.close(fd)
        try:
            tab = Tab(ours_in, ours_out, timeout_s)
            tab.attach()
            yield tab
        finally:
            os.close(ours_out)  # it ends when its pipe is closed
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(ours_in)
