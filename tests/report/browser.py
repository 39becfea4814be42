"""Headless Chromium, driven through the DevTools protocol over a pipe: nothing but the standard library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
LIMIT_S = 120.0
FREE_FD = 10
START = "import os, sys; [os.dup2(int(sys.argv[at]), at + 2) for at in (1, 2)]; os.execvp(sys.argv[3], sys.argv[3:])"
"""The browser reads commands from descriptor 3 and answers on 4."""


def program() -> str | None:
    """The browser of this machine."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in a browser of its own; close it at the end."""

    def __init__(self, folder: Path) -> None:
        to_browser, self._in = os.pipe()
        self._out, from_browser = os.pipe()
        fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, FREE_FD) for fd in (to_browser, from_browser)]
        words = [str(program()), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += [f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"]
        start = [sys.executable, "-S", "-c", START, *map(str, fds), *words]
        self._process = subprocess.Popen(start, pass_fds=fds, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for fd in (to_browser, from_browser, *fds):
            os.close(fd)
        self._rest, self._number, self._session = b"", 0, ""
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.refused: list[str] = []
        self._send("Log.enable")
        self._send("Runtime.enable")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def open(self, address: str, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Load a page and wait until its script has run."""
        self.refused.clear()
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._send("Emulation.setEmulatedMedia", features=scheme)
        self._send("Page.navigate", url=address)
        self.wait(f"location.href === {json.dumps(address)} && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, of a promise what it holds."""
        answer = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + LIMIT_S
        while not self.run(condition):
            assert time.monotonic() < end, f"never came true: {condition}"
            time.sleep(0.02)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", **more)

    def click(self, selector: str, count: int = 1) -> None:
        x, y = self.run(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect();"
            f" return [b.x + b.width / 2, b.y + b.height / 2]; }})(document.querySelector({json.dumps(selector)}))"
        )
        for at in range(1, count + 1):
            self.mouse("mousePressed", x, y, clickCount=at)
            self.mouse("mouseReleased", x, y, clickCount=at)

    def touch(self, *points: tuple[float, float]) -> None:
        """A finger that goes from point to point."""
        self._send("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=1)
        for at, (x, y) in enumerate(points):
            kind = "touchMove" if at else "touchStart"
            self._send("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y}])
        self._send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self._send("Emulation.setTouchEmulationEnabled", enabled=False)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._send("Input.dispatchKeyEvent", type=kind, key=key, **({"text": key} if len(key) == 1 else {}))

    def picture(self, out: Path) -> None:
        """A PNG of the whole page."""
        size = self._send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self._send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        out.write_bytes(base64.b64decode(answer["data"]))

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            if answer.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.refused.append(json.dumps(answer["params"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._out, 1 << 20)
            assert read, "the browser ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
