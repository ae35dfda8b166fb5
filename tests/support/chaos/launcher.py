"""Run the command line in child processes, and signal them at a chosen time.

One warm process imports everything once and forks a child for each command, so that starting a
command takes milliseconds instead of seconds. The child runs `compound.cli.main` with the given
arguments, working directory and limits. It is not patched, except that the waits before retries can
be shortened, and that a call can be made the last thing that it does.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from compound.execution.sender import FIRST_WAIT

ROOT = Path(__file__).parents[3]
KEY = "sk-chaos-7f3a9c51e2d84b06"
LONGEST = 300.0  # seconds after which a command is considered hung and is killed


@dataclass(frozen=True)
class Attempt:
    """Result of one command; `code` is its exit code, or minus the number of the signal that ended it."""

    code: int
    seconds: float
    out: str
    err: str

    @property
    def has_traceback(self) -> bool:
        """Whether the user saw a traceback, or a message that reports a bug of the program."""
        return "Traceback (most recent call last)" in self.err or "bug in compound" in self.err


Kind = Literal["before", "after", "torn"]


@dataclass(frozen=True)
class Death:
    """The call of a function at which a process kills itself: the ``nth`` one of ``module:name``.

    ``torn`` is after it, without the last bytes of the file that `RunDirectory.append` wrote.
    """

    at: str
    nth: int
    when: Kind = "after"

    def __str__(self) -> str:
        return f"{self.when} call {self.nth} of {self.at.rpartition(':')[2]}"

    def arrange(self) -> None:
        """Replace the function in this process."""
        module, _, path = self.at.partition(":")
        *parents, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
        original, numbers = getattr(owner, name), itertools.count(1)

        def last(*arguments: Any, **named: Any) -> Any:
            number = next(numbers)
            if number == self.nth and self.when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            found = original(*arguments, **named)
            if number == self.nth and self.when == "torn":
                path = arguments[0].path / arguments[1]
                os.truncate(path, path.stat().st_size - 9)
            if number == self.nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        setattr(owner, name, last)


class Launcher:
    """Context manager that runs commands.

    Args:
        environment: variables to add to those of this process.
        first_wait: seconds before the first retry of a call, from which later waits grow
            exponentially.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, *, first_wait: float = FIRST_WAIT
    ) -> None:
        own = {
            "HF_HUB_OFFLINE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OMP_NUM_THREADS": "1",
            "OPENAI_API_KEY": KEY,
        }
        self._environment = {**os.environ, **own, **(environment or {})}
        self._first_wait = first_wait
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Launcher:
        path = os.pathsep.join(
            [str(ROOT), str(ROOT / "tests" / "support"), self._environment.get("PYTHONPATH", "")]
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "chaos.launcher", str(self._first_wait)],
            env={**self._environment, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait(LONGEST)
            self._process.stdout.close()

    def run(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        strike: float | None = None,
        number: int = signal.SIGKILL,
        file_size: int | None = None,
        death: Death | None = None,
    ) -> Attempt:
        """Run one command until it ends or a signal ends it.

        Args:
            arguments: the arguments of ``compound``.
            folder: the working directory.
            strike: seconds after which the signal is sent; None for never.
            number: the signal.
            file_size: maximum size of any file in bytes, which simulates a full disk.
            death: the call at which the process kills itself.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = Order(list(arguments), str(folder), strike, int(number), file_size, death)
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        return Attempt(**json.loads(self._process.stdout.readline()))


@dataclass(frozen=True)
class Order:
    arguments: list[str]
    folder: str
    strike: float | None
    number: int
    file_size: int | None
    death: Death | None

    @classmethod
    def read(cls, line: str) -> Order:
        """Return the order that a line of JSON describes."""
        found = json.loads(line)
        return cls(**{**found, "death": Death(**found["death"]) if found["death"] else None})


def _serve() -> None:
    """Fork a child for each line of standard input, and print its result."""
    # Import once what the children would import each, so that they start fast.
    import gc

    import litellm  # noqa: F401
    import matplotlib.backends.backend_svg
    import matplotlib.figure  # noqa: F401
    import openai.resources  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers  # noqa: F401

    import compound.api.optimize
    import compound.api.progress
    import compound.cli
    import compound.execution.caller
    import compound.optimizers.methods
    import compound.report
    import compound.yaml

    setattr(compound.execution.caller, "FIRST_WAIT", float(sys.argv[1]))  # noqa: B010 - not exported there
    torch.set_num_threads(1)
    gc.freeze()  # a collection in a child does not copy the pages of what is imported
    for line in sys.stdin:
        print(json.dumps(asdict(_carry_out(Order.read(line)))), flush=True)


def _carry_out(order: Order) -> Attempt:
    import tempfile
    import time

    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.monotonic()
        child = os.fork()
        if not child:
            _become(order, out.fileno(), err.fileno())
        status, struck = 0, order.strike is None
        while not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            passed = time.monotonic() - started
            if not struck and order.strike is not None and passed >= order.strike:
                os.kill(child, order.number)
                struck = True
            if passed > LONGEST:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        status = os.waitpid(child, 0)[1]
        seconds = time.monotonic() - started
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
        return Attempt(os.waitstatus_to_exitcode(status), seconds, *texts)


def _become(order: Order, out: int, err: int) -> None:
    """Run the command in this child process; never returns."""
    import resource

    code = 70
    try:
        os.setsid()
        os.chdir(order.folder)
        null = os.open(os.devnull, os.O_RDONLY)
        for given, standard in ((null, 0), (out, 1), (err, 2)):
            os.dup2(given, standard)
        if order.file_size is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (order.file_size, order.file_size))
        if order.death is not None:
            order.death.arrange()
        from compound.cli import main

        sys.argv = ["compound", *order.arguments]
        sys.path[0] = order.folder
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:  # raised before the command installed its own handling
        code = 130
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
