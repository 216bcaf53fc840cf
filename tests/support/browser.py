"""A headless Chromium, driven through the DevTools protocol over a pipe.

    with Browser(path) as browser:
        page = browser.open(file.as_uri())
        page.drag((10, 10), (90, 10))
        assert page.run("document.title") == "..."

The browser reads JSON messages from file descriptor 3 and writes them to 4, each ended by a zero byte. This needs
neither a port nor a library.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 30.0
_ON_3_AND_4 = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, " ": 32}


def find_browser() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(AssertionError):
    """The browser has exited, does not answer, or reports an error."""


class Browser:
    def __init__(self, path: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="pynccl-tests-browser-")
        self._log = open(Path(self._folder, "log"), "w+")  # noqa: SIM115
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [sys.executable, "-c", _ON_3_AND_4, str(to_browser), str(from_browser), path, *_OPTIONS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._folder}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(BrowserError, OSError):
            self.ask("Browser.close")
        os.close(self._write)
        os.close(self._read)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, 9)
            self._process.wait()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result. Events that arrive in the meantime are appended to `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while True:
            answer = self._next(end, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self, end: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], max(end - time.monotonic(), 0))[0]:
                raise BrowserError(f"{method}: no answer within {SECONDS:g} s{self._log_tail()}")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise BrowserError(f"{method}: the browser has exited{self._log_tail()}")
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(text))

    def _log_tail(self) -> str:
        self._log.flush()
        self._log.seek(0)
        return f"; its log:\n{self._log.read()[-2000:]}"

    def open(self, address: str, width: int = 1100, height: int = 1000) -> Page:
        """Open a new tab."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.ask(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        page.ask("Emulation.setDeviceMetricsOverride", **size)
        page.go(address)
        return page


class Page:
    """One tab, with methods for its keyboard, mouse, JavaScript and console."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **parameters)

    def go(self, address: str) -> None:
        """Load the address and wait until it is complete."""
        self.ask("Page.navigate", url=address)
        self.until(
            lambda: self.run("document.readyState + location.href.split('#')[0]") == "complete" + address.split("#")[0]
        )

    def close(self) -> None:
        self._browser.ask("Target.closeTarget", targetId=self._target)

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; await it if it is a promise."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() > end:
                raise BrowserError(f"the condition did not become true within {SECONDS:g} s")
            self.run("new Promise((done) => setTimeout(done, 16))")  # lets a frame be drawn

    def press(self, key: str) -> None:
        text = key if len(key) == 1 else ""
        parameters = {"key": key, "windowsVirtualKeyCode": _KEYS.get(key, ord(key[0].upper())), "text": text}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **parameters)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **parameters)

    def drag(self, start: tuple[float, float], *way: tuple[float, float]) -> None:
        """Press the mouse button at `start`, move along `way`, and release it."""
        mouse = {"button": "left", "buttons": 1, "clickCount": 1}
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=start[0], y=start[1])
        self.ask("Input.dispatchMouseEvent", type="mousePressed", x=start[0], y=start[1], **mouse)
        for x, y in way:
            self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, **mouse)
        x, y = way[-1] if way else start
        self.ask("Input.dispatchMouseEvent", type="mouseReleased", x=x, y=y, button="left", clickCount=1)

    def click(self, selector: str) -> None:
        """Click the center of the first element that matches the selector."""
        x, y, w, h = self.box(selector)
        self.drag((x + w / 2, y + h / 2))

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Return (left, top, width, height) in window pixels of the first element that matches the selector."""
        rectangle = self.run(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)}); if (!one) return null;"
            "one.scrollIntoView({block: 'nearest', inline: 'nearest'});"
            "const r = one.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; })()"
        )
        if rectangle is None:
            raise BrowserError(f"no element of the page matches {selector}")
        x, y, width, height = rectangle
        return x, y, width, height

    def errors(self) -> list[str]:
        """Return the console messages and uncaught exceptions of all tabs so far."""
        found = []
        for event in self._browser.events:
            parameters = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled":
                found.append(str(parameters["args"]))
            elif event["method"] == "Log.entryAdded":
                found.append(parameters["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Return the URLs requested by all tabs so far, except the pages themselves."""
        events = [event["params"] for event in self._browser.events if event["method"] == "Network.requestWillBeSent"]
        return [event["request"]["url"] for event in events if event.get("type") != "Document"]
