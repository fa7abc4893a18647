"""Drive a headless Chromium over a pipe, by the DevTools protocol: pages as rendered, without a network."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--disable-features=Translate,OptimizationHints,MediaRouter", "--remote-debugging-pipe",
)  # fmt: skip


class Chromium:
    """A browser with one page. What it prints to its console, throws and asks the network for is kept.

    Attributes:
        problems: Errors and warnings of the console, exceptions and violations of the page's policy.
        requests: Addresses that the page asked for, the page itself and what it carries inside apart.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="chromium-"))
        to_read, self.write = os.pipe()
        self.read, to_write = os.pipe()
        # The browser reads descriptor 3 and writes descriptor 4.
        shell = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        command = ["bash", "-c", shell, BINARY, *OPTIONS, f"--user-data-dir={self.folder / 'profile'}", "about:blank"]
        self.process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self.buffer, self.count = b"", 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.session = None
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.loaded = False

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False, scripts: bool = True) -> None:
        """Load a file in a window of a size, and wait until it is there."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.problems, self.requests, self.loaded = [], [], False
        self.call("Page.navigate", url=path.as_uri())
        self.until(lambda: self.loaded)

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window a size; narrow ones are those of a phone."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def run(self, script: str):
        """The value of an expression in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", str(answer)))
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression in the page is true."""
        self.until(lambda: self.run(f"Boolean({condition})"))

    def draw_all(self) -> None:
        """Bring every figure into view, and wait until all are drawn."""
        for index in range(self.run("document.querySelectorAll('figure').length")):
            figure = f"document.querySelectorAll('figure')[{index}]"
            self.run(f"{figure}.scrollIntoView()")
            self.wait_for(f"{figure}.dataset.drawn")
        self.run("window.scrollTo(0, 0)")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **typed)

    def point_at(self, x: float, y: float) -> None:
        """Move the mouse to a point, from beside it."""
        for at in (x - 2, x):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=at, y=y)

    def picture(self, file: Path, whole: bool = False) -> None:
        """Save what is seen as PNG."""
        self.save(file, self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def print(self, file: Path) -> None:
        """Save the printed page as PDF."""
        self.save(file, self.call("Page.printToPDF", printBackground=True)["data"])

    @staticmethod
    def save(file: Path, data: str) -> None:
        file.write_bytes(base64.b64decode(data))

    def call(self, method: str, **params):
        """Send one command and wait for its answer."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session and not method.startswith("Target."):
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        number, answer = self.count, {}
        while answer.get("id") != number:
            answer = self.receive()
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def until(self, done, seconds: float = 60) -> None:
        """Read events until something has come true."""
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                raise TimeoutError("the page did not get there")
            self.receive(0.05)

    def receive(self, seconds: float = 60):
        """The next message; an empty one where none came in time, if the time was short."""
        while b"\0" not in self.buffer:
            if not select.select([self.read], [], [], seconds)[0]:
                if seconds < 1:
                    return {}
                raise TimeoutError("Chromium does not answer")
            part = os.read(self.read, 1 << 20)
            if not part:
                raise RuntimeError("Chromium ended")
            self.buffer += part
        text, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(text)
        self.note(message.get("method"), message.get("params", {}))
        return message

    def note(self, method, params) -> None:
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str([each.get("value", each.get("description")) for each in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent" and params["type"] != "Document":
            url = params["request"]["url"]
            if not url.startswith(("data:", "blob:")):
                self.requests.append(url)

    def close(self) -> None:
        """End the browser and remove its profile."""
        self.process.terminate()
        self.process.wait(20)
        os.close(self.read)
        os.close(self.write)
        shutil.rmtree(self.folder, ignore_errors=True)
