"""A real headless Chromium, driven through its DevTools pipe (`--remote-debugging-pipe`): no port needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pytest

from tests.conftest import HUNG

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--no-default-browser-check", "--disable-background-networking", "--disable-component-update",
    "--disable-extensions", "--disable-sync", "--hide-scrollbars", "--mute-audio", "--remote-debugging-pipe",
    "--disable-features=Translate,OptimizationHints,MediaRouter,DialMediaRouteProvider",
    "--disable-breakpad", "--disable-crash-reporter", "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # the page must not need the internet
)  # fmt: skip


def chromium_program() -> str:
    """The browser; without it tests are skipped, except in CI, where they fail."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("no Chromium here; `make test TORCH=1` as root installs Debian's")
        pytest.skip("no Chromium here")
    return found


class Chromium:
    """One browser with one tab; ended at the end of the `with`, with everything it started."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        program = chromium_program()  # first: without one the test is skipped, and leaves nothing open
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        words = [program, *_FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"]

        # The browser expects commands on 3 and answers on 4.
        def place() -> None:
            read, write = os.dup(to_read), os.dup(to_write)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self._process = subprocess.Popen(
            [*words, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=place,
            start_new_session=True,
            env={**os.environ, "HOME": str(folder)},
        )
        os.close(to_read)
        os.close(to_write)
        self._data = b""
        self._number = 0
        self._session = ""
        self.messages: list[str] = []
        """What the page wrote to its console, and refusals of its policy."""

    def __enter__(self) -> Chromium:
        try:
            tabs = self.call("Target.getTargets")["targetInfos"]
            tab = next(one["targetId"] for one in tabs if one["type"] == "page")
            self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        left = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.wait()
        for one in left:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                pass
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, and its result."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + HUNG
        while True:
            got = self._next(end)
            if got.get("id") == number:
                if "error" in got:
                    raise AssertionError(f"{method}: {got['error']}")
                result: dict[str, Any] = got["result"]
                return result

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._data:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise AssertionError(f"the browser did not answer within {HUNG:.0f} s")
            more = os.read(self._read, 1 << 20)
            if not more:
                raise AssertionError("the browser has ended")
            self._data += more
        line, _, self._data = self._data.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        if found.get("method") == "Log.entryAdded":
            self.messages.append(str(found["params"]["entry"]["text"]))
        elif found.get("method") == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(found["params"]["exceptionDetails"])[:500])
        return found

    def open(self, address: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        got = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in got:
            raise AssertionError(f"{script[:200]}: {got['exceptionDetails']}")
        return got["result"].get("value")

    def wait(self, condition: str, what: str = "") -> Any:
        """Until an expression is true; it is looked at in the page, whenever something may have changed."""
        end = time.monotonic() + HUNG
        while True:
            try:
                value = self.run(condition)
            except AssertionError:  # between two documents
                value = None
            if value:
                return value
            if time.monotonic() > end:
                raise AssertionError(
                    f"not within {HUNG:.0f} s: {what or condition}; console: {self.messages}"
                )
            select.select([], [], [], 0.05)

    def resize(self, width: int, height: int, phone: bool = False) -> None:
        """The size of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip

    def prefer(self, scheme: str) -> None:
        """light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """What the window shows."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def key(self, name: str) -> None:
        """Press a key."""
        codes = {"ArrowRight": 39, "ArrowDown": 40, "Enter": 13, "Tab": 9, "Escape": 27}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=codes[name])
