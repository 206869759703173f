# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image
from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_START_S = 30.0
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # Chromium refuses its sandbox to root, and containers have none to give
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--remote-debugging-port=0",
)


def find_browser() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """The one page of a browser."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self.events: list[dict[str, Any]] = []  # what the browser reported unasked, such as requests

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol and its answer."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps(request))
        while True:
            answer = json.loads(self._socket.recv(timeout=60.0))
            if "method" in answer:
                self.events.append(answer)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(self, url: str, width: int, height: int, phone: bool = False) -> None:
        """Show an address in a window of this size, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str, limit_s: float = 60.0) -> None:
        """Wait until an expression holds in the page; in a page half loaded, which cannot evaluate it, it does not."""
        deadline = time.monotonic() + limit_s
        guarded = f"(() => {{ try {{ return Boolean({expression}); }} catch {{ return false; }} }})()"
        while not self.value(guarded):
            assert time.monotonic() < deadline, f"not within {limit_s} s: {expression}"
            time.sleep(0.1)

    def requests(self) -> list[str]:
        """The address of everything that pages asked for; begin with ``call("Network.enable")``."""
        self.value("0")
        asked = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return asked + [e["params"]["url"] for e in self.events if e["method"] == "Network.webSocketCreated"]

    def screenshot(self) -> np.ndarray:
        """What is shown: uint8 (height, width, 3), RGB."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
            return np.asarray(picture.convert("RGB"))


@contextmanager
def browser(path: str) -> Iterator[Page]:
    """A browser with one page, ended with all its processes."""
    with tempfile.TemporaryDirectory(prefix="browser", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [path, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            with connect(_page_address(process), max_size=None) as socket:
                page = Page(socket)
                yield page
                page.call("Browser.close")
        finally:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stderr is not None:
                process.stderr.close()


def _page_address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    deadline = time.monotonic() + _START_S
    for line in process.stderr:
        found = re.search(r"DevTools listening on ws://([\w.:]+)/", line)
        if found:
            with urllib.request.urlopen(f"http://{found[1]}/json/list", timeout=10.0) as answer:
                pages = json.load(answer)
            return str(next(p for p in pages if p["type"] == "page")["webSocketDebuggerUrl"])
        if time.monotonic() > deadline:
            break
    raise RuntimeError("Chromium did not start")
