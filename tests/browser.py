"""Chromium without a screen, over its DevTools protocol: to look at a page and press keys."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60


def found() -> str | None:
    """The browser's command."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._windows: list[Page] = []
        self._socket = websocket.create_connection(address, timeout=SECONDS, suppress_origin=True)
        self._number = 0
        self.complaints: list[str] = []
        """What the console said, and errors that nobody caught."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command, and its answer."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message["method"]:
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(params["args"]))
            case "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])
            case "Page.javascriptDialogOpening":
                self.complaints.append(f"dialog: {params['message']}")

    def window(self) -> Page:
        """Another window of the same browser: unlike a tab, it is seen beside this one."""
        target = self.call("Target.createTarget", url="about:blank", newWindow=True)["targetId"]
        made = Page(f"{self._address.rpartition('/')[0]}/{target}")
        self._windows.append(made)
        return made

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """What an expression gives; a promise is waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Return once it is true, looked at whenever the page is drawn."""
        assert self.value(
            "new Promise((done) => { const end = performance.now() + 30000; const look = () => {"
            f" let is = false; try {{ is = {expression} }} catch {{}}"
            " if (is || performance.now() > end) done(Boolean(is));"
            " else requestAnimationFrame(look); }; look(); })"
        ), f"not within 30 s: {expression}"

    def press(self, key: str) -> None:
        """A letter, a sign or Escape, as a keyboard sends it."""
        more: dict[str, Any] = {"text": key} if len(key) == 1 else {"windowsVirtualKeyCode": 27}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **more)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        for each in self._windows:
            each.close()
        self._socket.close()


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with one tab; it ends with the block."""
    command = found()
    assert command is not None
    options = [
        "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}",
        "--no-sandbox",  # root has none
        "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
    ]  # fmt: skip
    # It leaves folders there, with a socket in one: the path must be short.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        process = subprocess.Popen(
            [command, *options, "about:blank"], stderr=subprocess.PIPE, text=True,
            errors="replace", env=os.environ | {"TMPDIR": temporary},
        )  # fmt: skip
        assert process.stderr is not None
        with process.stderr as said:
            try:
                port = next(
                    match[1]
                    for line in said
                    if (match := re.search(r"listening on ws://[^:]+:(\d+)", line))
                )
                page = Page(_tab(int(port)))
                try:
                    yield page
                finally:
                    with contextlib.suppress(OSError, RuntimeError, websocket.WebSocketException):
                        page.call("Browser.close")
                    page.close()
            finally:
                process.terminate()
                process.wait(SECONDS)


def _tab(port: int) -> str:
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=SECONDS) as answer:
        tabs = json.loads(answer.read())
    address: str = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
    return address
