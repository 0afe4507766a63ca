"""An engine in a process of its own: started, asked, ended; and what it said where it dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from hacrl.errors import SamplerError

LOG_LINES = 20
CLOSE_SECONDS = 5.0


class EngineProcess:
    """Runs `worker` (see `vllm.py` for the protocol) with the interpreter `python`.

    `folder` is a new temporary folder for weights, in shared memory where it has `bytes_needed`; it goes when the
    process is closed, or when this one dies. What the worker prints is appended to `log`, or to a file in `folder`.
    """

    def __init__(
        self,
        agent: str,
        *,
        python: str,
        worker: Path,
        environment: Mapping[str, str],
        log: Path | None,
        bytes_needed: int,
    ) -> None:
        self.agent = agent
        self.folder = Path(tempfile.mkdtemp(prefix="hacrl-", dir=_roomy_folder(bytes_needed)))
        self.log = log or self.folder / "engine.log"
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            ours, theirs = Pipe()
            self._connection = ours
            with self.log.open("ab") as output, theirs:
                self._begin = output.tell()
                self._process = subprocess.Popen(
                    [python, str(worker), str(theirs.fileno()), str(self.folder), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **environment},
                    # Ctrl-C asks this process to stop after the step; it must not end the engine in the midst of it.
                    start_new_session=True,
                )
        except OSError as error:
            self.close()
            raise SamplerError(f"agent {agent}: the engine cannot be started with {python}: {error}") from error

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def call(self, method: str, /, **arguments: Any) -> Any:
        """The method's result. Raises SamplerError, the engine closed, where it fails or the process ends."""
        process = self._process
        if process is None:
            raise SamplerError(f"agent {self.agent}: the engine has been closed")
        try:
            self._connection.send((method, arguments))
            # Looked at in turns: a child of a dead engine may hold the other end of the pipe open.
            while not self._connection.poll(1.0):
                if process.poll() is not None:
                    raise EOFError
            kind, value = self._connection.recv()
        except (EOFError, OSError):
            raise self._died(process) from None
        except BaseException:
            # The reply is still to come; it must not be taken for that of a later call.
            self.close()
            raise
        if kind == "error":
            where = self._where()
            self.close()
            raise SamplerError(f"agent {self.agent}: the engine failed at {method!r}: {value}\n{where}")
        return value

    def close(self) -> None:
        """End the process with all it started, and remove its folder."""
        process, self._process = self._process, None
        if process is not None:
            self._connection.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _died(self, process: subprocess.Popen[bytes]) -> SamplerError:
        try:
            code = process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        where = self._where()
        self.close()
        return SamplerError(f"agent {self.agent}: the engine {how} (SIGKILL often means: out of memory)\n{where}")

    def _where(self) -> str:
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(self._begin)
            lines = file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
            return "\n".join([f"the last lines of {self.log}:", *(f"  {line}" for line in lines)])
        return f"{self.log} cannot be read"


def _roomy_folder(bytes_needed: int) -> str | None:
    shared = Path("/dev/shm")
    with contextlib.suppress(OSError):
        if os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > bytes_needed:
            return str(shared)
    return None
