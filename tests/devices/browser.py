"""A headless Chromium, driven through its debugging pipe: commands to descriptor 3, answers from 4, each ended by a zero byte."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any


class Browser:
    """One page. Close it, or use it in a with statement."""

    def __init__(self, executable: str, profile: Path) -> None:
        (there_in, self._to), (self._from, there_out) = os.pipe(), os.pipe()
        words = [executable, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe",
                 f"--user-data-dir={profile}", "about:blank"]  # fmt: skip
        ends = tuple(fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (there_in, there_out))  # neither is 3 or 4
        command = f"exec {shlex.join(words)} 3<&{ends[0]} 4>&{ends[1]}"
        self._process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=ends, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        for end in (there_in, there_out, *ends):
            os.close(end)
        self._rest, self._ids = b"", itertools.count(1)
        target = self.call("Target.createTarget", {"url": "about:blank"}, page=False)["targetId"]
        self._session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True}, page=False)[
            "sessionId"
        ]

    def call(self, method: str, parameters: dict[str, Any], page: bool = True) -> dict[str, Any]:
        """One command of the protocol, to the page or the browser; its result."""
        number = next(self._ids)
        message = {
            "id": number,
            "method": method,
            "params": parameters,
            **({"sessionId": self._session} if page else {}),
        }
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                more = os.read(self._from, 1 << 16)
                assert more, f"Chromium ended: {self._process.wait()}"
                self._rest += more
            text, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page, of a promise what it comes to."""
        got = self.call("Runtime.evaluate", {"expression": script, "awaitPromise": True, "returnByValue": True})
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def choose_file(self, selector: str, path: Path) -> None:
        """What a person does at an <input type=file>."""
        root = self.call("DOM.getDocument", {})["root"]["nodeId"]
        node = self.call("DOM.querySelector", {"nodeId": root, "selector": selector})["nodeId"]
        self.call("DOM.setFileInputFiles", {"nodeId": node, "files": [str(path)]})

    def close(self) -> None:
        """Ends the browser."""
        os.close(self._to), os.close(self._from)
        self._process.terminate()
        self._process.wait()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
