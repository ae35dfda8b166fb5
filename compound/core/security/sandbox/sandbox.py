"""Run Python programs in a sandbox, without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import json
import os
import re
import sys
import tempfile
import weakref
from asyncio.subprocess import Process
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from compound.core.errors import CallError, MissingExtra, SandboxUnavailable
from compound.core.security.sandbox.launchers import (
    LAUNCHERS,
    Launcher,
    LauncherName,
    python_view,
    unused_uid,
)
from compound.core.security.sandbox.limits import LimitName, SandboxLimits, limit_of
from compound.core.security.sandbox.stage import FILES, READY, Payload
from compound.core.security.sanitize import replace_surrogates

FOLDER = "/tmp/work"  # nosec B108  # inside the sandbox, on a file system of its own
MAIN = "main.py"
ENVIRONMENT: Mapping[str, str] = {
    "HOME": FOLDER,
    "LANG": "C.UTF-8",
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "USER": "sandbox",
}
"""The whole environment of a sandboxed program."""
_SETUP_SECONDS = 20.0  # time to build the sandbox, which does not count as time of the program
_LONGEST_PATH = 500
_CHUNK = 1 << 16


@dataclass(frozen=True)
class SandboxResult:
    """End of a sandboxed program.

    Attributes:
        stdout: standard output, cut at the limit of output.
        stderr: standard error, likewise.
        status: exit status; 128 plus the number of the signal that ended the program.
        limit: the limit that ended the program, or ``""``. For limits that Python turns into
            exceptions, such as ``memory``, it is read from the traceback of an uncaught one.
    """

    stdout: str
    stderr: str
    status: int
    limit: LimitName = ""

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself with status 0."""
        return self.status == 0 and not self.limit


@dataclass(eq=False)
class Sandbox:
    """Runs Python programs with this interpreter and its installed packages, isolated from this machine.

    A program sees its own files, Python and its packages, and nothing else of this machine: no
    network, no other processes, no environment variables. All its processes end with it.

    Attributes:
        limits: resources of each program.
        concurrency: number of programs that run at the same time; default: the number of
            processors.
        launcher: ``bubblewrap`` or ``namespaces``; default: the first one that works.
    """

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    concurrency: int = field(default_factory=lambda: os.cpu_count() or 1)
    launcher: LauncherName | None = None

    def __post_init__(self) -> None:
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    async def run(
        self,
        code: str,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> SandboxResult:
        """Run a program and return its end, whatever it is.

        Args:
            code: the program.
            stdin: its standard input.
            files: further text files in its working directory, by relative path.
            arguments: its command line arguments.

        Raises:
            CallError: the path of a file is invalid.
            SandboxUnavailable: there is no sandbox on this machine.
            MissingExtra: pyseccomp is not installed.
        """
        loop = asyncio.get_running_loop()
        turn = self._turns.setdefault(loop, asyncio.Semaphore(self.concurrency))
        texts = {**{check_path(path): text for path, text in (files or {}).items()}, MAIN: code}
        found = {path: replace_surrogates(text) for path, text in texts.items()}
        async with turn:
            launcher = await find_launcher(self.launcher)
            return await _launch(launcher, self.limits, found, replace_surrogates(stdin), arguments)


def check_path(path: str) -> str:
    """Return a path below the working directory of a program.

    >>> check_path("data/rows.csv")
    'data/rows.csv'
    >>> check_path("../rows.csv")
    Traceback (most recent call last):
    compound.core.errors.CallError: '../rows.csv' is not a path of a file below the working directory
    """
    parts = path.split("/")
    if (
        len(path) > _LONGEST_PATH
        or not path.isprintable()
        or any(part in ("", ".", "..") for part in parts)
    ):
        raise CallError(
            f"{path[:_LONGEST_PATH]!r} is not a path of a file below the working directory"
        )
    return path


async def find_launcher(name: LauncherName | None = None) -> Launcher:
    """Return the launcher of that name, or the first one that works.

    Raises:
        SandboxUnavailable: none works; the message says why, and how to get one.
        MissingExtra: pyseccomp is not installed.
    """
    reasons: list[str] = []
    for launcher in LAUNCHERS:
        if name in (None, launcher.name):
            if (reason := await _why_not(launcher)) is None:
                return launcher
            reasons.append(f"{launcher.name}: {reason}")
    hint = (
        "install bubblewrap, on Debian and Ubuntu by: apt-get install bubblewrap; in a container, allow "
        "user namespaces, for example by: docker run --security-opt seccomp=unconfined"
    )
    if any(re.search("execvp|Python|test program|File exists", reason) for reason in reasons):
        hint = f"Python of {sys.prefix} cannot be used in the sandbox; use an environment in your home folder"
    raise SandboxUnavailable(
        "generated code runs only in a sandbox, and none works here: " + "; ".join(reasons),
        hint=hint,
    )


_TRIED: dict[tuple[LauncherName, str | None], str | None] = {}


async def _why_not(launcher: Launcher) -> str | None:
    """Return why a launcher does not work, or None; it is tried once per process."""
    key = (launcher.name, os.environ.get("PATH"))
    if key not in _TRIED:
        _TRIED[key] = await _try(launcher)
    return _TRIED[key]


async def _try(launcher: Launcher) -> str | None:
    if sys.platform != "linux":
        return "it needs Linux"
    if missing := launcher.missing():
        return f"{missing} is not installed (package {launcher.package})"
    try:
        result = await _launch(launcher, SandboxLimits(), {MAIN: "print('works')"}, "", ())
    except SandboxUnavailable as error:
        return error.message
    if result.stdout == "works\n":
        return None
    return f"a test program failed: {result.stderr.strip()[-300:]}"


@contextlib.contextmanager
def _sealed(name: str, content: bytes) -> Iterator[int]:
    """Give a descriptor of a file in memory that cannot be changed."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


async def _launch(
    launcher: Launcher,
    limits: SandboxLimits,
    files: Mapping[str, str],
    stdin: str,
    arguments: Sequence[str],
) -> SandboxResult:
    payload: Payload = {
        "argv": [python_view().python, "-s", "-B", "-X", "utf8", f"{FOLDER}/{MAIN}", *arguments],
        "files": dict(files),
        "folder": FOLDER,
        "uid": unused_uid(),
        "rlimits": limits.rlimits(),
        "view": launcher.view(limits),
        "filter": None,
    }
    with contextlib.ExitStack() as stack:
        compiled = stack.enter_context(_sealed("filter", compile_filter()))
        if payload["view"] is not None:
            payload["filter"] = compiled
        document = stack.enter_context(_sealed("payload", json.dumps(payload).encode()))
        given = stack.enter_context(_sealed("stdin", stdin.encode()))
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        try:
            process = await asyncio.create_subprocess_exec(
                *launcher.command(limits, compiled, document, writing),
                stdin=given,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(document, writing, compiled),
                env=dict(ENVIRONMENT),
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(writing)
        try:
            return await _follow(process, reading, limits)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


async def _follow(process: Process, reading: int, limits: SandboxLimits) -> SandboxResult:
    """Wait for the end of a program, or kill it at a limit."""
    collected = _Outputs(process, limits.output * 1024)
    collecting = asyncio.ensure_future(collected.read())
    killed: LimitName = ""
    try:
        await _wait_until_ready(reading, collecting, collected)
        try:
            async with asyncio.timeout(limits.wall):
                await process.wait()
        except TimeoutError:
            killed = "wall"
            process.kill()
            await process.wait()
        await collecting  # the pipes are closed when the last process of the sandbox is gone
        with contextlib.suppress(BlockingIOError):
            if said := os.read(reading, 500):
                raise SandboxUnavailable(f"Python does not start in the sandbox: {said.decode()}")
    finally:
        collecting.cancel()
    stdout, stderr = collected.texts()
    status = process.returncode or 0
    status = 128 - status if status < 0 else status
    if collected.full:
        killed = "output"
    return SandboxResult(stdout, stderr, status, killed or limit_of(status, stderr))


async def _wait_until_ready(
    reading: int, collecting: asyncio.Future[None], collected: _Outputs
) -> None:
    """Wait until the program starts."""
    reader = asyncio.StreamReader()
    pipe = os.fdopen(os.dup(reading), "rb", 0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        async with asyncio.timeout(_SETUP_SECONDS):
            said = await reader.read(len(READY))
            if said == READY:
                return
            said += await reader.read()
            await collecting
    except TimeoutError:
        raise SandboxUnavailable(
            f"the sandbox did not start within {_SETUP_SECONDS:g} seconds"
        ) from None
    finally:
        transport.close()
    message = said.decode("utf-8", "replace")
    if message.startswith(FILES):
        raise CallError(
            f"the files of a sandboxed program cannot be written: {message.removeprefix(FILES)}"
        )
    reason = message or collected.texts()[1].strip()[-500:] or "it ended at once"
    raise SandboxUnavailable(f"the sandbox cannot be built: {reason}")


class _Outputs:
    """Collects stdout and stderr of a process, and kills it when they are too long."""

    def __init__(self, process: Process, most: int) -> None:
        self.full = False
        self._process = process
        self._left = most
        self._read: tuple[bytearray, bytearray] = (bytearray(), bytearray())

    async def read(self) -> None:
        """Read until both are closed."""
        pipes = (self._process.stdout, self._process.stderr)
        await asyncio.gather(*(self._drain(p, b) for p, b in zip(pipes, self._read, strict=True)))

    async def _drain(self, pipe: asyncio.StreamReader | None, found: bytearray) -> None:
        while pipe is not None and (chunk := await pipe.read(_CHUNK)):
            found += chunk[: self._left]
            if len(chunk) > self._left and not self.full:
                self.full = True
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
            self._left = max(0, self._left - len(chunk))

    def texts(self) -> tuple[str, str]:
        """Return what was read."""
        stdout, stderr = (bytes(found).decode("utf-8", "replace") for found in self._read)
        return stdout, stderr


_PLAIN = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range dup dup2 dup3
open openat openat2 creat access faccessat faccessat2 stat fstat lstat newfstatat statx statfs fstatfs
getdents getdents64 getcwd chdir fchdir mkdir mkdirat rmdir rename renameat renameat2 link linkat unlink
unlinkat symlink symlinkat readlink readlinkat chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat
umask truncate ftruncate fallocate utime utimes utimensat futimesat
sendfile splice tee copy_file_range getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
mmap munmap mprotect mremap brk membarrier
pipe pipe2 select pselect6 poll ppoll
eventfd eventfd2 timerfd_create timerfd_settime timerfd_gettime signalfd signalfd4
bind listen accept accept4 connect shutdown getsockname getpeername getsockopt setsockopt
sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg
fork vfork execve exit exit_group wait4 waitid kill tkill tgkill pidfd_open pidfd_send_signal
getpid getppid gettid getpgid getpgrp getsid setsid setpgid getuid geteuid getgid getegid getgroups
getresuid getresgid setuid setgid setgroups setresuid setresgid capget capset
futex futex_waitv set_robust_list get_robust_list set_tid_address rseq arch_prctl prctl
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_tgsigqueueinfo
rt_sigsuspend sigaltstack restart_syscall pause alarm setitimer getitimer
nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times
sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_getscheduler
sched_get_priority_max sched_get_priority_min getpriority setpriority getcpu
getrlimit setrlimit getrusage sysinfo uname getrandom ioprio_get
"""
# they succeed without effect: of a visible file, they would flush this machine's disk
_FLUSHES = "fsync fdatasync sync_file_range msync"
_NAMESPACES = 0x7E020080  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET} and CLONE_NEWTIME
# AF_UNIX, AF_INET, AF_INET6; AF_VSOCK and AF_NETLINK do not depend on the namespace
_FAMILIES = (1, 2, 10)
# those of terminals, FIONREAD, FIONBIO, FIO[N]CLEX
_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# F_DUPFD, F_[GS]ETF[DL], F_GETLK, F_DUPFD_CLOEXEC, F_GETPIPE_SZ, F_GET_SEALS
_COMMANDS = (0, 1, 2, 3, 4, 5, 1030, 1032, 1034)
# F_SETLK, F_SETLKW: they seem to succeed, since SQLite needs them
_LOCKS = (6, 7)
# advice on the program's own pages; not MERGEABLE, COLD, PAGEOUT, HWPOISON
_ADVICE = (0, 1, 2, 3, 4, 8, 9, 10, 11, 14, 15, 16, 17, 18, 19)
_LOW = 0xFFFFFFFF  # the kernel reads 32 bits of these arguments


@functools.cache
def compile_filter() -> bytes:
    """Return the program of the filter for this machine's architecture."""
    try:
        import pyseccomp
    except ModuleNotFoundError as error:
        raise MissingExtra("running generated code", "pyseccomp", "sandbox") from error
    except (RuntimeError, OSError) as error:
        raise SandboxUnavailable(
            f"running generated code needs the library libseccomp: {error}",
            hint="install it, on Debian and Ubuntu with: apt-get install libseccomp2",
        ) from error
    program = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))
    for name in _PLAIN.split():
        if _is_known(pyseccomp, name):
            program.add_rule(pyseccomp.ALLOW, name)
    for name in _FLUSHES.split():
        if _is_known(pyseccomp, name):
            program.add_rule(pyseccomp.ERRNO(0), name)
    equal = pyseccomp.MASKED_EQ
    program.add_rule(pyseccomp.ALLOW, "clone", pyseccomp.Arg(0, equal, _NAMESPACES, 0))
    for family in _FAMILIES:
        program.add_rule(pyseccomp.ALLOW, "socket", pyseccomp.Arg(0, equal, _LOW, family))
        program.add_rule(pyseccomp.ALLOW, "socketpair", pyseccomp.Arg(0, equal, _LOW, family))
    # its own limits
    program.add_rule(pyseccomp.ALLOW, "prlimit64", pyseccomp.Arg(0, equal, _LOW, 0))
    allowed = ("ioctl", 1, _REQUESTS), ("fcntl", 1, _COMMANDS), ("madvise", 2, _ADVICE)
    for call, place, values in allowed:
        for value in values:
            program.add_rule(pyseccomp.ALLOW, call, pyseccomp.Arg(place, equal, _LOW, value))
    for command in _LOCKS:
        program.add_rule(pyseccomp.ERRNO(0), "fcntl", pyseccomp.Arg(1, equal, _LOW, command))
    with tempfile.TemporaryFile() as file:
        program.export_bpf(file)
        file.seek(0)
        return file.read()


def _is_known(pyseccomp: object, name: str) -> bool:
    """Return whether the architecture has the system call, and libseccomp knows it."""
    try:
        number: int = pyseccomp.resolve_syscall(pyseccomp.system_arch(), name)  # type: ignore[attr-defined]
    except (OSError, ValueError):
        return False
    return number >= 0
