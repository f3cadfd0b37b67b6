"""What tests of devices share."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "c")]

from ctools import sh, tool


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A real sshd on a free port of the loopback interface, with keys of its own; the device's text."""
    daemon = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    tool("ssh"), daemon or tool("sshd")
    for name in ("host", "user"):
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    (tmp_path / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/user.pub\nStrictModes no\n"
        f"PasswordAuthentication no\nUsePAM no\nPidFile {tmp_path}/pid\nPermitRootLogin prohibit-password\n"
    )
    os.makedirs("/run/sshd", exist_ok=True)
    process = subprocess.Popen([str(daemon), "-D", "-e", "-f", str(tmp_path / "config")], stderr=subprocess.PIPE)
    monkeypatch.setenv("TRIVET_SSH", shlex.join(["ssh", "-F", "none", "-i", str(tmp_path / "user"), "-o", "StrictHostKeyChecking=no",
                                                 "-o", f"UserKnownHostsFile={tmp_path}/known", "-o", "LogLevel=ERROR"]))  # fmt: skip
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert process.poll() is None, process.stderr.read()  # type: ignore[union-attr]
            time.sleep(0.1)
    yield f"ssh://{getpass.getuser()}@127.0.0.1:{port}"
    process.terminate()
    process.wait()
