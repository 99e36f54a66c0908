"""A headless Chromium, told what to do over pipes (the DevTools protocol). Standard library only."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE_S = 60.0
OPTIONS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update",
    "--disable-breakpad", "--disable-crash-reporter", "--no-zygote", "--mute-audio", "--hide-scrollbars",
    "--font-render-hinting=none", "--force-color-profile=srgb",
)  # fmt: skip


def find() -> str | None:
    """A Chromium on PATH, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page. ``events``: what it told so far, (method, parameters)."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self.process, self._to, self._back = process, to, back
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[tuple[str, dict[str, Any]]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer. RuntimeError where it is refused, TimeoutError where nothing comes."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            told = self._next(deadline, method)
            if told.get("id") == self._number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']['message']}")
                return dict(told["result"])
            if "method" in told:
                self.events.append((told["method"], told.get("params", {})))

    def _next(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left_s = deadline - time.monotonic()
            ready, _, _ = select.select([self._back], [], [], max(0.0, left_s))
            chunk = os.read(self._back, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError(f"chromium has not answered {what}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def show(
        self, page: Path | str, width: int, *, dark: bool, height: int = 900, scale: float = 1.0
    ) -> None:
        """Opens a file or an address at that width, in the light or in the dark, and waits for it."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                 mobile=False)  # fmt: skip
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=scheme)
        self.events.clear()
        self.ask("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        deadline = time.monotonic() + PATIENCE_S
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            told = self._next(deadline, "Page.navigate")
            if "method" in told:
                self.events.append((told["method"], told.get("params", {})))

    def value(self, expression: str) -> Any:
        """The value that a JavaScript expression gives in the page."""
        done = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(str(done["exceptionDetails"]))
        return done["result"].get("value")

    def picture(self, clip: tuple[float, float, float, float] | None = None) -> bytes:
        """A PNG of the whole page, or of (x, y, width, height) of it."""
        if clip is None:
            size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
            clip = (0, 0, size["width"], size["height"])
        x, y, width, height = clip
        area = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
        shot = self.ask("Page.captureScreenshot", format="png", clip=area, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def complaints(self) -> list[str]:
        """Errors and warnings on its console since the page was opened."""
        out = []
        for method, told in self.events:
            if method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
                out.append(told["entry"]["text"])
            if method == "Runtime.exceptionThrown":
                out.append(str(told["exceptionDetails"].get("text")))
            if method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
                out.append(str(told["args"]))
        return out

    def requests(self) -> list[str]:
        """Every address that was asked for since the page was opened."""
        return [
            told["request"]["url"] for method, told in self.events if method == "Network.requestWillBeSent"
        ]


@contextlib.contextmanager
def browser(program: str | None = None) -> Iterator[Browser]:
    """Chromium while the block runs, in a folder of its own; nothing of it is left afterwards."""
    program = program or find()
    if program is None:
        raise FileNotFoundError("there is no chromium on PATH")
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    folder = tempfile.mkdtemp(prefix="chromium-")
    # It reads commands from descriptor 3 and answers on 4.
    words = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "-", program, *OPTIONS]
    process = subprocess.Popen(
        [*words, f"--user-data-dir={folder}", f"--disk-cache-dir={folder}/cache"],
        pass_fds=(theirs_in, theirs_out),
        env={**os.environ, "HOME": folder, "XDG_CONFIG_HOME": folder, "XDG_CACHE_HOME": folder},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        made = Browser(process, ours_out, ours_in)
        yield made
        made._session = ""
        with contextlib.suppress(RuntimeError, TimeoutError, OSError):
            made.ask("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for descriptor in (ours_in, ours_out):
            os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)
