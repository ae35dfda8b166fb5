"""Ordinary programs in the sandbox: their results, limits, concurrency, and errors where there is no sandbox."""

from __future__ import annotations

import asyncio
import math
import os
import site
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from compound.core.errors import DeclarationError, MissingExtra, SandboxUnavailable
from compound.core.security.sandbox import launchers, sandbox
from compound.core.security.sandbox.launchers import LauncherName, python_view
from compound.core.security.sandbox.limits import SandboxLimits
from compound.core.security.sandbox.sandbox import Sandbox, SandboxResult
from sandboxes import require_sandbox


@pytest.fixture(params=["bubblewrap", "namespaces"])
def launcher(request: pytest.FixtureRequest) -> LauncherName:
    require_sandbox(request.param)
    name: LauncherName = request.param
    return name


def run(launcher: LauncherName | None, code: str, **more: Any) -> SandboxResult:
    return asyncio.run(Sandbox(SandboxLimits(wall=60), launcher=launcher).run(code, **more))


def test_a_program_reads_its_input_and_files_and_writes_text(launcher: LauncherName) -> None:
    code = "import sys\nprint(sys.stdin.read(), open('a/b.txt', newline='').read(), sys.argv[1:])\nprint('é', file=sys.stderr)"
    found = run(
        launcher, code, stdin="Grüße\n", files={"a/b.txt": "one\r\ntwo"}, arguments=["x", "y z"]
    )
    assert found == SandboxResult("Grüße\n one\r\ntwo ['x', 'y z']\n", "é\n", 0)
    assert found.ok


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(7)", 7),
        ("1 / 0", 1),
        ("(", 1),
        ("import os; os._exit(125)", 125),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("import os; os.abort()", 134),
        ("import ctypes; ctypes.string_at(0)", 139),
    ],
)
def test_a_program_that_fails_is_a_result(launcher: LauncherName, code: str, status: int) -> None:
    found = run(launcher, code)
    assert (found.status, found.limit, found.ok) == (status, "", False)


def test_installed_packages_and_child_processes_of_python_work(launcher: LauncherName) -> None:
    code = """
import json, multiprocessing, os, ssl, sqlite3, subprocess, sys, tempfile, threading, uuid
with tempfile.TemporaryDirectory() as folder:
    open(os.path.join(folder, "x"), "w").write("x")
print(subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout)
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(abs, [-1, -2]))
print(os.path.expanduser("~"), os.getcwd(), sqlite3.connect(":memory:").execute("select 1").fetchone())
"""
    found = run(launcher, code)
    assert found.stdout.split() == ["42", "[1,", "2]", "/tmp/work", "/tmp/work", "(1,)"], (
        found.stderr
    )


def test_a_package_of_the_environment_can_be_imported(launcher: LauncherName) -> None:
    import pydantic

    if not any(pydantic.__file__.startswith(path) for path in python_view().paths):
        pytest.skip("pydantic is not in the site-packages of this interpreter")
    assert (
        run(launcher, "import pydantic; print(pydantic.__version__)").stdout.strip()
        == pydantic.__version__
    )


@pytest.mark.parametrize("place", ["env", "linked/env", "with space/a/env"])
def test_an_environment_below_a_private_folder_is_visible_and_sealed(
    launcher: LauncherName, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as top:
        Path(top, "real").mkdir()
        Path(top, "linked").symlink_to("real")
        environment = Path(top, place)
        packages = environment / f"lib/python3.{sys.version_info.minor}/site-packages"
        packages.mkdir(parents=True)
        packages.joinpath("only_here.py").write_text("x = 6", encoding="utf-8")
        python = environment / "bin/python"
        python.parent.mkdir()
        python.symlink_to(os.path.realpath(sys.executable))
        home = f"home = {Path(sys.base_prefix, 'bin')}\n"
        environment.joinpath("pyvenv.cfg").write_text(home, encoding="utf-8")
        monkeypatch.setattr(sys, "executable", str(python))
        monkeypatch.setattr(sys, "prefix", str(environment))
        monkeypatch.setattr(site, "PREFIXES", [str(environment)])
        python_view.cache_clear()
        try:
            found = run(launcher, REPLACE)
        finally:
            python_view.cache_clear()
    assert found.stdout.split() == ["6", "7", "sealed"], found.stderr


REPLACE = """
import only_here, os, subprocess, sys
print(only_here.x, subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, text=True).stdout)
place, found = only_here.__file__, "sealed"
while os.path.dirname(place) != "/tmp":
    for change in (os.unlink, os.rmdir, lambda path: os.rename(path, "/tmp/x"), lambda path: open(path + "/x", "w")):
        try:
            change(place)
            found = place
        except OSError: pass
    place = os.path.dirname(place)
open("/tmp/file", "w").close()
print(found)
"""


async def test_the_loop_is_not_blocked_and_programs_run_at_the_same_time(
    launcher: LauncherName,
) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticking = asyncio.create_task(tick())
    meeting = Sandbox(SandboxLimits(wall=60), concurrency=2, launcher=launcher)
    results = await asyncio.gather(*(meeting.run("import time; time.sleep(0.3)") for _ in range(2)))
    ticking.cancel()
    assert [found.ok for found in results] == [True, True]
    assert ticks > 10


def test_no_more_programs_run_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    running = most = 0

    async def launch(*_: object) -> SandboxResult:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return SandboxResult("works\n", "", 0)

    monkeypatch.setattr(sandbox, "_launch", launch)
    monkeypatch.setattr(sandbox, "_TRIED", {})
    monkeypatch.setattr(launchers.Bubblewrap, "missing", lambda self: "")
    monkeypatch.setattr(sys, "platform", "linux")

    async def many() -> None:
        bounded = Sandbox(concurrency=3)
        await asyncio.gather(*(bounded.run("") for _ in range(12)))

    asyncio.run(many())
    asyncio.run(many())
    assert most == 3


def test_results_are_equal_in_both_launchers() -> None:
    require_sandbox("bubblewrap")
    require_sandbox("namespaces")
    code = "import os, sys\nprint({1, 'a', 'b'}, hash('x'), os.listdir('.'), sys.executable, os.getpid())\n1 / 0"
    assert run("bubblewrap", code) == run("namespaces", code)


def test_without_a_launcher_nothing_runs_and_the_error_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "_TRIED", {})
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="bwrap is not .*unshare, setpriv is not") as error:
        run(None, "print('ran')")
    assert "apt-get install bubblewrap" in error.value.hint


def test_on_another_system_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_TRIED", {})
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="it needs Linux"):
        run(None, "print('ran')")


def test_without_the_library_of_the_filter_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_TRIED", {})
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    monkeypatch.setattr(launchers.Launcher, "missing", lambda self: "")
    sandbox.compile_filter.cache_clear()
    with pytest.raises(MissingExtra, match=r"pyseccomp, .*installed; pip install .*\[sandbox\]"):
        run(None, "print('ran')")


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        ("paths", "the sandbox cannot be built|a test program failed"),
        ("python", "does not start|a test program failed"),
    ],
)
def test_a_sandbox_that_cannot_be_built_is_an_error(
    launcher: LauncherName, view: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = python_view()
    changed = {"paths": real.paths, "links": real.links, "python": real.python}
    changed[view] = ("/no/such/path",) if view == "paths" else "/no/such/python"
    broken = type(real)(**changed)  # type: ignore[arg-type]
    monkeypatch.setattr(sandbox, "_TRIED", {})
    monkeypatch.setattr(launchers, "python_view", lambda: broken if view == "paths" else real)
    monkeypatch.setattr(sandbox, "python_view", lambda: broken)
    with pytest.raises(SandboxUnavailable, match=reason) as error:
        run(launcher, "print('ran')")
    if view == "python":
        assert "use an environment in your home folder" in error.value.hint


@pytest.mark.parametrize(
    "name", ["cpu", "wall", "memory", "processes", "file_size", "disk", "open_files", "output"]
)
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, True, "5", None])
def test_limits_are_positive_numbers(name: str, value: Any) -> None:
    with pytest.raises(DeclarationError, match=f"the limit {name} must be a positive"):
        SandboxLimits(**{name: value})


def test_a_long_message_of_the_program_is_kept_up_to_the_limit(launcher: LauncherName) -> None:
    limits = SandboxLimits(output=1)
    code = "import sys\nprint('x' * 600, flush=True)\nprint('y' * 600, file=sys.stderr)"
    found = asyncio.run(Sandbox(limits, launcher=launcher).run(code))
    assert found.limit == "output"
    assert len(found.stdout) + len(found.stderr) == 1024
