"""A page in a headless Chromium, driven over its DevTools protocol."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

_START_S = 30


class Tab:
    """A tab of the browser.

    troubles: errors in the browser's console.
    asked: addresses of all requests.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self.troubles: list[str] = []
        self.asked: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        told = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps(told))
        while True:
            message = json.loads(self._socket.recv(timeout=_START_S))
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def js(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.command(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str, within_s: float = 10.0) -> None:
        deadline = time.monotonic() + within_s
        while not self.js(expression):
            assert time.monotonic() < deadline, (expression, self.js("document.body.innerText"))
            time.sleep(0.05)

    def open(self, url: str) -> None:
        """Load a page with empty session storage."""
        self.command("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")
        self.js("sessionStorage.clear()")
        self.reload()

    def reload(self) -> None:
        self.js("window.before = true")
        self.command("Page.reload")
        self.until("!window.before && document.readyState === 'complete'")
        self.troubles.clear()

    def text(self, selector: str) -> str:
        text: str = self.js(f"document.querySelector({json.dumps(selector)}).innerText")
        return text

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def _note(self, message: dict[str, Any]) -> None:
        told = message.get("params", {})
        match message["method"]:
            case "Network.requestWillBeSent":
                self.asked.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                self.troubles.append(json.dumps(told["exceptionDetails"]))
            case "Log.entryAdded" if told["entry"]["source"] != "network":
                self.troubles.append(told["entry"]["text"])


@contextmanager
def chromium(folder: Path) -> Iterator[Tab]:
    """Run Chromium; skip the test if it is not installed."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("there is no chromium: apt-get install --no-install-recommends chromium")
    process = subprocess.Popen(
        [
            program,
            "--headless=new",
            "--no-sandbox",  # the sandbox does not work for root, who runs tests in containers
            "--disable-gpu",
            "--hide-scrollbars",
            "--disable-dev-shm-usage",
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
            "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=(folder / "stderr").open("w"),
    )
    try:
        address = _address(folder / "stderr", process)
        tabs = httpx.get(f"http://{address}/json/list").json()
        socket = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        with connect(socket, max_size=None) as connection:
            yield Tab(connection)
    finally:
        process.kill()
        process.wait()


def _address(log: Path, process: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        if found := re.search(r"ws://([^/]+)/", log.read_text()):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"chromium did not start: {log.read_text()}")
