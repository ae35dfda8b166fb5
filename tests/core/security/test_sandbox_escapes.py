"""Attempts to leave the sandbox, to fill the machine, or to survive: all are contained, by both launchers."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compound.core.errors import CompoundError
from compound.core.security.sandbox.launchers import LauncherName
from compound.core.security.sandbox.limits import LimitName, SandboxLimits
from compound.core.security.sandbox.sandbox import Sandbox, SandboxResult
from sandboxes import require_sandbox

SMALL = SandboxLimits(
    cpu=5, wall=15, memory=256, processes=16, file_size=2, disk=4, open_files=32, output=16
)
PRELUDE = """\
import ctypes, errno, os, signal, socket, stat, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def attempt(name, action):
    try:
        found = action()
    except BaseException as error:
        print("contained", name, type(error).__name__, error)
    else:
        print("ESCAPED", name, repr(found)[:200])

def call(number, *arguments):
    ctypes.set_errno(0)
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "allowed"
"""
LAUNCHERS: tuple[LauncherName, ...] = ("bubblewrap", "namespaces")


@pytest.fixture(params=LAUNCHERS, scope="module")
def launcher(request: pytest.FixtureRequest) -> LauncherName:
    require_sandbox(request.param)
    name: LauncherName = request.param
    return name


def run(
    launcher: LauncherName, code: str, limits: SandboxLimits = SMALL, **more: Any
) -> SandboxResult:
    return asyncio.run(Sandbox(limits, launcher=launcher).run(PRELUDE + code, **more))


@dataclass(frozen=True)
class Outside:
    """Things of this machine that programs try to reach."""

    secret: Path
    folder: Path
    port: int
    path_socket: str
    abstract: str


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    folder = tmp_path_factory.mktemp("outside")
    folder.chmod(0o777)
    secret = folder / "secret.txt"
    secret.write_text("the secret", encoding="utf-8")
    secret.chmod(0o666)
    token = secrets.token_hex(8)
    path_socket = f"/tmp/escape-{token}"
    servers = [socket.create_server(("127.0.0.1", 0))]
    for address in (path_socket, f"\0escape-{token}"):
        server = socket.socket(socket.AF_UNIX)
        server.bind(address)
        server.listen()
        servers.append(server)
    os.chmod(path_socket, 0o777)
    yield Outside(secret, folder, servers[0].getsockname()[1], path_socket, f"escape-{token}")
    for server in servers:
        server.close()
    os.unlink(path_socket)


REFUSED = {
    "read-passwd": "attempt('passwd', lambda: open('/etc/passwd').read())",
    "read-shadow": "attempt('shadow', lambda: open('/etc/shadow').read())",
    "read-secret": "attempt('secret', lambda: open(SECRET).read())",
    "read-home": "attempt('home', lambda: os.listdir('/home'))\nattempt('ssh', lambda: os.listdir('/root/.ssh'))",
    "read-this-file": "attempt('repository', lambda: os.listdir(HERE))",
    "read-by-relative-path": "attempt('relative', lambda: open('../../../../../../../..' + SECRET).read())",
    "read-through-symlink": "os.symlink(SECRET, 'link')\nattempt('symlink', lambda: open('link').read())",
    "read-through-dev-fd": "attempt('fd', lambda: os.listdir('/dev/fd'))",
    "write-secret": "attempt('write', lambda: open(SECRET, 'w'))",
    "write-beside-secret": "attempt('write', lambda: open(FOLDER + '/new', 'w'))",
    "write-root": "attempt('root', lambda: open('/new', 'w'))\nattempt('mkdir', lambda: os.mkdir('/new'))",
    "write-etc": "attempt('etc', lambda: open('/etc/ld.so.preload', 'w'))",
    "write-library": "attempt('lib', lambda: open('/usr/lib/new', 'w'))\nattempt('stdlib', lambda: open(os.__file__, 'a'))",
    "write-site-packages": (
        "import site\nfor place in [*site.getsitepackages(), os.path.dirname(os.__file__)]:\n"
        "    for name in ('x.pth', 'sitecustomize.py', 'usercustomize.py'):\n"
        "        attempt(name, lambda: open(os.path.join(place, name), 'w'))"
    ),
    "write-interpreter": "attempt('python', lambda: open(os.path.realpath(sys.executable), 'r+b'))",
    "write-device-folder": "attempt('dev', lambda: open('/dev/new', 'w'))",
    "hard-link": "attempt('link', lambda: os.link(os.__file__, 'stolen.py'))\nattempt('secret', lambda: os.link(SECRET, 's'))",
    "chmod": "attempt('chmod', lambda: os.chmod(os.__file__, 0o777))\nattempt('utime', lambda: os.utime(os.__file__))",
    "remove": "attempt('unlink', lambda: os.unlink(os.__file__))\nattempt('rename', lambda: os.rename(os.__file__, 'x'))",
    "proc": (
        "for name in ('self/environ', '1/environ', '1/root', 'self/mem', 'self/maps', 'kcore', 'sysrq-trigger', 'mounts', 'cmdline'):\n"
        "    attempt(name, lambda: os.stat('/proc/' + name))"
    ),
    "sys": "attempt('sys', lambda: os.listdir('/sys/class'))\nattempt('cgroup', lambda: os.listdir('/sys/fs/cgroup'))",
    "devices": (
        "for name in ('sda', 'vda', 'nvme0n1', 'mem', 'kmem', 'kmsg', 'port', 'fuse', 'kvm', 'vsock', 'tty', 'console', 'ptmx', 'pts/0', 'loop-control', 'net/tun', 'nvidia0'):\n"
        "    attempt(name, lambda: os.open('/dev/' + name, os.O_RDWR))"
    ),
    "mknod": (
        "attempt('mknod', lambda: os.mknod('disk', 0o666 | stat.S_IFBLK, os.makedev(8, 0)))\n"
        "attempt('mem', lambda: os.mknod('mem', 0o666 | stat.S_IFCHR, os.makedev(1, 1)))"
    ),
    "chroot": "attempt('chroot', lambda: os.chroot('/tmp'))",
    "mount": (
        "def mount(*a):\n    if libc.mount(*a) < 0: raise OSError(ctypes.get_errno(), 'mount')\n"
        "attempt('tmpfs', lambda: mount(b'none', b'/tmp', b'tmpfs', 0, None))\n"
        "attempt('proc', lambda: mount(b'none', b'/tmp', b'proc', 0, None))\n"
        "attempt('remount', lambda: mount(None, b'/', None, 32 | 4096, None))\n"
        "def umount():\n    if libc.umount2(b'/tmp', 2) < 0: raise OSError(ctypes.get_errno(), 'umount')\n"
        "attempt('umount', umount)"
    ),
    "new-namespaces": (
        "for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x8000000, 0x4000000, 0x2000000, 0x80):\n"
        "    attempt(hex(flag), lambda: call(N['unshare'], flag))\n"
        "    attempt(hex(flag), lambda: call(N['clone'], flag | 17, 0, 0, 0, 0))"
    ),
    "become-root": (
        "before = os.getresuid()\n"
        "def become():\n    os.setresuid(0, 0, 0)\n    if before == (0, 0, 0): raise OSError('root of a namespace, without capabilities')\n"
        "attempt('setuid', become)"
    ),
    "capabilities": (
        "header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()\n"
        "call(N['capget'], header, data)\nprint('permitted', list(data))\n"
        "assert not any(data), list(data)\n"
        "data[1] = data[0] = 1\nattempt('capset', lambda: call(N['capset'], header, data))"
    ),
    "setuid-programs": (
        "def find():\n"
        "    found = [os.path.join(d, f) for top in ('/usr', '/bin', '/sbin', '/opt') for d, _, fs in os.walk(top) for f in fs if f in ('su', 'sudo', 'mount', 'passwd', 'pkexec', 'newuidmap')]\n"
        "    if not found: raise OSError('none is visible')\n    return found\n"
        "attempt('setuid', find)\n"
        "assert libc.prctl(39, 0, 0, 0, 0) == 1, 'no_new_privs'"
    ),
    "shell": "attempt('sh', lambda: subprocess.run('id', shell=True, check=True))\nattempt('ls', lambda: subprocess.run(['/bin/ls', '/']))",
    "internet": (
        "socket.setdefaulttimeout(3)\n"
        "attempt('tcp', lambda: socket.create_connection(('1.1.1.1', 80)))\n"
        "attempt('udp', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('1.1.1.1', 53)))\n"
        "attempt('six', lambda: socket.create_connection(('2606:4700:4700::1111', 80)))\n"
        "attempt('name', lambda: socket.getaddrinfo('example.com', 80))\n"
        "attempt('gateway', lambda: socket.create_connection(('169.254.169.254', 80)))"
    ),
    "loopback-of-this-machine": "attempt('server', lambda: socket.create_connection(('127.0.0.1', PORT), 3))",
    "raw-sockets": (
        "for family in (socket.AF_INET, socket.AF_INET6):\n"
        "    attempt('raw', lambda: socket.socket(family, socket.SOCK_RAW, 1))\n"
        "for family in (16, 17, 40, 38, 31, 29):\n"
        "    attempt(family, lambda: socket.socket(family, socket.SOCK_RAW))\n"
        "    attempt(family, lambda: socket.socket(family, socket.SOCK_STREAM))\n"
        "    attempt(family, lambda: socket.socket(family, socket.SOCK_DGRAM))"
    ),
    "unix-socket": "attempt('unix', lambda: socket.socket(socket.AF_UNIX).connect(PATH_SOCKET))",
    "abstract-socket": "attempt('abstract', lambda: socket.socket(socket.AF_UNIX).connect('\\0' + ABSTRACT))",
    "known-sockets": (
        "for path in ('/var/run/docker.sock', '/run/docker.sock', '/run/systemd/private', '/run/dbus/system_bus_socket'):\n"
        "    attempt(path, lambda: socket.socket(socket.AF_UNIX).connect(path))"
    ),
    "signal-to-this-machine": "for pid in (HOST, HOST_PARENT):\n    attempt(pid, lambda: os.kill(pid, 0))",
    "descriptors": (
        "found = []\nfor number in range(3, 1000):\n"
        "    try: os.fstat(number)\n    except OSError: continue\n    found.append(number)\n"
        "def none():\n    if not found: raise OSError('none')\n    return found\n"
        "attempt('descriptors', none)"
    ),
    "stdin-of-the-caller": "attempt('stdin', lambda: os.write(0, b'x'))\nattempt('truncate', lambda: os.ftruncate(0, 1 << 30))",
    "terminal": (
        "attempt('tty', lambda: os.open('/dev/tty', os.O_RDWR))\n"
        "import fcntl\n"
        "for request in (0x5412, 0x541C, 0x5412 | 1 << 32):\n"
        "    for number in (0, 1, 2):\n"
        "        attempt(hex(request), lambda: call(N['ioctl'], number, ctypes.c_ulong(request), b'x'))\n"
        "assert os.getsid(0) == os.getpid() or os.getsid(0) != 0"
    ),
    "hostname-and-clock": (
        "attempt('hostname', lambda: socket.sethostname('x'))\n"
        "attempt('clock', lambda: time.clock_settime(time.CLOCK_REALTIME, 0))"
    ),
    "raise-limits": (
        "import resource\nfor name in ('AS', 'NPROC', 'FSIZE', 'NOFILE', 'CPU', 'CORE'):\n"
        "    attempt(name, lambda: resource.setrlimit(getattr(resource, 'RLIMIT_' + name), (-1, -1)))\n"
        "attempt('nice', lambda: os.nice(-5))\n"
        "attempt('fifo', lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))"
    ),
    "files-and-limits-of-the-same-user": (
        "import fcntl, mmap, resource\nvisible = os.open(os.__file__, os.O_RDONLY)\n"
        "for name in ('SETLEASE', 'GETLEASE', 'NOTIFY', 'SETOWN', 'SETSIG', 'OFD_SETLK', 'OFD_SETLKW', 'SETPIPE_SZ', 'ADD_SEALS'):\n"
        "    command = getattr(fcntl, 'F_' + name)\n"
        "    for number in (command, command | 1 << 32):\n"
        "        attempt(name, lambda: call(N['fcntl'], visible, ctypes.c_ulong(number), 0))\n"
        "for number in (15, 16, 1035, 1036, 1039):\n    attempt(number, lambda: call(N['fcntl'], visible, number, HOST))\n"
        "for file in (visible, os.open('/dev/null', os.O_RDWR)):\n    attempt('flock', lambda: fcntl.flock(file, fcntl.LOCK_SH))\n"
        "page = mmap.mmap(visible, 4096, prot=mmap.PROT_READ)\n"
        "for advice in (12, 20, 21, 100):\n    attempt(advice, lambda: page.madvise(advice))\n"
        "attempt('fadvise', lambda: os.posix_fadvise(visible, 0, 0, os.POSIX_FADV_DONTNEED))\n"
        "attempt('epoll', lambda: __import__('select').epoll())\n"
        "attempt('limits of another process', lambda: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0)))\n"
        "info = (ctypes.c_int * 32)(40, 0, -1)\nsignal.pthread_sigmask(signal.SIG_BLOCK, [40])\n"
        "attempt('signals', lambda: [call(N['rt_sigqueueinfo'], os.getpid(), 40, info) for _ in range(1000)])"
    ),
    "disable-the-filter": "attempt('seccomp', lambda: call(N['prctl'], 22, 0, 0, 0, 0))",
    "environment": (
        "extra = set(os.environ) - {'HOME', 'LANG', 'MPLBACKEND', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS', 'PYTHONHASHSEED', 'USER', 'PWD'}\n"
        "def leak():\n    if not extra: raise OSError('nothing else')\n    return extra\n"
        "attempt('environment', leak)"
    ),
}


def names(outside: Outside) -> str:
    import pyseccomp

    wanted = ("unshare", "clone", "capget", "capset", "ioctl", "prctl", "fcntl", "rt_sigqueueinfo")
    numbers = {name: pyseccomp.resolve_syscall(pyseccomp.system_arch(), name) for name in wanted}
    return (
        f"SECRET, FOLDER, PORT = {str(outside.secret)!r}, {str(outside.folder)!r}, {outside.port}\n"
        f"PATH_SOCKET, ABSTRACT = {outside.path_socket!r}, {outside.abstract!r}\n"
        f"HOST, HOST_PARENT, HERE = {os.getpid()}, {os.getppid()}, {str(Path(__file__).parent)!r}\nN = {numbers!r}\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("attack", REFUSED)
def test_what_a_program_attempts_is_refused(
    launcher: LauncherName, outside: Outside, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    found = run(launcher, names(outside) + REFUSED[attack])
    assert found.ok, found.stderr
    assert "contained" in found.stdout
    assert "ESCAPED" not in found.stdout
    assert outside.secret.read_text(encoding="utf-8") == "the secret"
    assert sorted(p.name for p in outside.folder.iterdir()) == ["secret.txt"]


FORBIDDEN_CALLS = """
ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd process_madvise mount umount2
pivot_root chroot fsopen fsmount fsconfig fspick move_mount open_tree mount_setattr unshare
setns clone3 keyctl add_key request_key bpf userfaultfd perf_event_open io_uring_setup
io_uring_enter io_uring_register io_setup io_submit memfd_create memfd_secret shmget shmat
shmctl semget msgget mq_open mlock mlockall mlock2 kexec_load kexec_file_load init_module
finit_module delete_module reboot swapon swapoff acct quotactl syslog personality modify_ldt
iopl ioperm sethostname setdomainname clock_settime settimeofday adjtimex clock_adjtime
open_by_handle_at name_to_handle_at fanotify_init fanotify_mark lookup_dcookie vhangup
nfsservctl mbind migrate_pages move_pages set_mempolicy get_mempolicy mknod mknodat flock
inotify_init inotify_init1 inotify_add_watch epoll_create epoll_create1 timer_create fadvise64
mincore seccomp landlock_create_ruleset setxattr lsetxattr fsetxattr removexattr
sched_setscheduler sched_setattr uselib ustat sysfs vserver
"""


def test_forbidden_system_calls_do_not_exist(launcher: LauncherName) -> None:
    """Each returns ENOSYS before the kernel looks at an argument."""
    import pyseccomp

    numbers: dict[str, int] = {}
    for name in FORBIDDEN_CALLS.split():
        try:
            number = pyseccomp.resolve_syscall(pyseccomp.system_arch(), name)
        except (OSError, ValueError):
            continue  # unknown to this version of libseccomp
        if number >= 0:
            numbers[name] = number
    assert len(numbers) > 70
    numbers |= {f"future{number}": number for number in (470, 500, 999)}
    code = f"""
import json
found = {{}}
for name, number in {numbers!r}.items():
    ctypes.set_errno(0)
    found[name] = (libc.syscall(number, 0, 0, 0, 0, 0, 0), ctypes.get_errno())
print(json.dumps(found))
"""
    found = run(launcher, code)
    assert found.ok, found.stderr
    refused = json.loads(found.stdout)
    assert {name: answer for name, answer in refused.items() if answer != [-1, 38]} == {}


@pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="other system call tables are of this architecture"
)
@pytest.mark.parametrize(
    ("table", "code"),
    [
        ("x32", "call(0x40000000 | 39)\nprint('ESCAPED')"),
        (
            "i386",
            "import mmap\nplace = mmap.mmap(-1, 4096, prot=7)\n"
            "place.write(bytes.fromhex('b814000000cd80c3'))\n"  # mov eax, 20; int 0x80; ret
            "address = ctypes.addressof(ctypes.c_char.from_buffer(place))\n"
            "ctypes.CFUNCTYPE(ctypes.c_int)(address)()\nprint('ESCAPED')",
        ),
    ],
)
def test_another_table_of_system_calls_cannot_be_used(
    launcher: LauncherName, table: str, code: str
) -> None:
    found = run(launcher, code)
    assert not found.ok
    assert "ESCAPED" not in found.stdout


def test_record_locks_of_a_program_bind_nobody(launcher: LauncherName) -> None:
    """They must succeed for SQLite, but visible files are shared with this machine."""
    code = """
import fcntl, sqlite3
first, second = sqlite3.connect("a.db"), sqlite3.connect("a.db")
first.execute("create table t (x)")
first.execute("insert into t values (1)")
first.commit()
print(second.execute("select * from t").fetchall(), flush=True)
for file, how in ((open(os.__file__), fcntl.LOCK_SH), (open("/dev/null", "w"), fcntl.LOCK_EX)):
    fcntl.lockf(file, how)
    if os.fork() == 0:
        print("lock" if fcntl.fcntl(file, fcntl.F_GETLK, b"\\1" + bytes(31))[0] != fcntl.F_UNLCK else "no lock")
        os._exit(sys.stdout.flush() or 0)
    os.wait()
"""
    assert run(launcher, code).stdout.splitlines() == ["[(1,)]", "no lock", "no lock"]


def test_flushes_of_a_program_do_not_reach_the_disk(launcher: LauncherName) -> None:
    """They must succeed for databases, so the kernel would refuse these arguments if it saw them."""
    import pyseccomp

    calls = ("fsync", "fdatasync", "sync_file_range", "msync")
    numbers = [pyseccomp.resolve_syscall(pyseccomp.system_arch(), name) for name in calls]
    found = run(launcher, f"for number in {numbers}: print(call(number, 999, 1, 1, 99))")
    assert found.stdout.split() == ["allowed"] * len(calls), found.stderr


EXHAUSTING: dict[str, tuple[str, set[LimitName]]] = {
    "memory": ("x = bytearray(1 << 40)", {"memory"}),
    "memory-slowly": ("x = []\nwhile True: x.append(bytearray(1 << 20))", {"memory"}),
    "memory-anonymous": (
        "import mmap\nx = [mmap.mmap(-1, 1 << 26) for _ in range(99)]",
        {"", "memory"},
    ),
    "memory-of-numbers": ("import numpy\nx = numpy.ones(1 << 30)", {"memory"}),
    "loop": ("while True: pass", {"cpu"}),
    "loop-ignoring-signals": (
        "for s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass",
        {"cpu", ""},
    ),
    "sleep": ("time.sleep(999)", {"wall"}),
    "stop-itself": ("os.kill(os.getpid(), signal.SIGSTOP)", {"wall"}),
    "file": ("f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 16))", {"file_size"}),
    "sparse-file": ("os.truncate(os.open('f', os.O_CREAT | os.O_RDWR), 1 << 40)", {"file_size"}),
    "disk": ("for i in range(99):\n    open(f'f{i}', 'wb').write(bytes(1 << 20))", {"disk"}),
    "shared-memory": (
        "for i in range(99):\n    open(f'/dev/shm/f{i}', 'wb').write(bytes(1 << 20))",
        {"disk"},
    ),
    "open-files": ("x = [open('/dev/null') for _ in range(99)]", {"open_files"}),
    "sockets": ("x = [socket.socket() for _ in range(99)]", {"open_files"}),
    "processes": ("for _ in range(99):\n    if os.fork() == 0: time.sleep(99)", {"processes"}),
    "threads": (
        "for _ in range(99): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        {"processes"},
    ),
    "output": ("while True: print('x' * 999)", {"output"}),
    "errors": ("while True: print('x' * 999, file=sys.stderr)", {"output"}),
    "output-of-children": (
        "if os.fork() == 0:\n    while True: print('x' * 999)\ntime.sleep(99)",
        {"output"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("attack", EXHAUSTING)
def test_a_program_that_exhausts_a_resource_ends_at_its_limit(
    launcher: LauncherName, attack: str
) -> None:
    code, limits = EXHAUSTING[attack]
    waiting = SandboxLimits(**{**vars(SMALL), "cpu": 1, "wall": 2 if limits == {"wall"} else 60})
    found = run(launcher, code, waiting)
    if "No module named 'numpy'" in found.stderr:
        pytest.skip("numpy is not in the site-packages of this interpreter")
    assert not found.ok
    assert found.limit in limits, found
    assert len(found.stdout) + len(found.stderr) <= SMALL.output * 1024


def test_a_fork_bomb_stays_within_the_number_of_processes(launcher: LauncherName) -> None:
    code = """
def bomb():
    while True:
        try: os.fork()
        except OSError: time.sleep(0.01)
if os.fork() == 0: bomb()
time.sleep(1)
for _ in range(100):
    try: pid = os.fork()
    except OSError: continue
    if pid == 0: time.sleep(99)
    print("forked")
print("still alive")
"""
    limits = SandboxLimits(**{**vars(SMALL), "wall": 6})
    found = run(launcher, code, limits)
    assert "still alive" in found.stdout
    assert found.stdout.count("forked") < SMALL.processes


def test_many_small_files_are_bounded_where_the_mount_allows_it() -> None:
    """Bubblewrap cannot bound the number of files; each takes about 1 KiB of kernel memory."""
    require_sandbox("namespaces")
    code = "for i in range(99_999): os.close(os.open(f'f{i}', os.O_CREAT | os.O_WRONLY))"
    found = run("namespaces", code)
    assert found.limit == "disk"


def is_running(token: str) -> bool:
    found = False
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found = found or token.encode() in (entry / "cmdline").read_bytes()
            except OSError:
                continue
    return found


LEFT_OVER = """
import os, signal, sys, time
for _ in range(2):
    if os.fork(): continue
    os.setsid()
    if os.fork(): os._exit(0)
    for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(s, signal.SIG_IGN)
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]])
print("started", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["os._exit(0)", "time.sleep(99)", "os.kill(os.getpid(), 9)"])
def test_no_process_outlives_the_program(launcher: LauncherName, end: str) -> None:
    token = f"left-over-{secrets.token_hex(8)}"
    limits = SandboxLimits(**{**vars(SMALL), "wall": 3})
    found = run(launcher, LEFT_OVER + f"time.sleep(0.3)\n{end}", limits, arguments=[token])
    assert "started" in found.stdout
    wait_for_end(token)


def wait_for_end(token: str) -> None:
    for _ in range(200):
        if not is_running(token):
            return
        threading.Event().wait(0.05)
    pytest.fail(f"{token} is still running")


async def test_a_cancelled_program_leaves_nothing(launcher: LauncherName) -> None:
    token = f"left-over-{secrets.token_hex(8)}"
    sandbox = Sandbox(SMALL, launcher=launcher)
    task = asyncio.create_task(sandbox.run(LEFT_OVER + "time.sleep(99)", arguments=[token]))
    while not is_running(token):  # noqa: ASYNC110 - another process sends no event
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_for_end(token)


async def test_programs_die_with_the_process_that_started_them(launcher: LauncherName) -> None:
    token = f"left-over-{secrets.token_hex(8)}"
    source = f"""
import asyncio, sys
from compound.core.security.sandbox.sandbox import Sandbox
asyncio.run(Sandbox(launcher={launcher!r}).run({LEFT_OVER + "time.sleep(99)"!r}, arguments=[{token!r}]))
"""
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", source, env=environment)
    while not is_running(f"{token}\0"):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    process.kill()
    await process.wait()
    wait_for_end(f"{token}\0")


def test_signals_reach_only_processes_of_the_program(launcher: LauncherName) -> None:
    code = """
for pid in (1, os.getppid()):
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGHUP):
        try: os.kill(pid, number)
        except OSError: pass
time.sleep(0.2)
print("alive", os.getppid() in (0, 1))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
try: os.kill(-1, signal.SIGTERM)
except OSError: pass
print("alive")
"""
    found = run(launcher, code)
    assert found.stdout.splitlines() == ["alive True", "alive"]
    assert found.ok


async def test_a_program_does_not_see_other_programs(launcher: LauncherName) -> None:
    sandbox = Sandbox(SMALL, concurrency=2, launcher=launcher)
    code = (
        "import os, time\nopen('/tmp/mark', 'x').close()\nopen('/dev/shm/mark', 'x').close()\n"
        "time.sleep(0.5)\nprint(sorted(os.listdir('/tmp')), sorted(os.listdir('/dev/shm')), os.getpid())"
    )
    results = [await sandbox.run(code)]
    results += await asyncio.gather(sandbox.run(code), sandbox.run(code))
    assert {found.stdout for found in results} == {"['mark', 'work'] ['mark'] 2\n"}


@pytest.mark.parametrize(
    "name",
    [
        "--bind",
        "-",
        "a b",
        "$(id)",
        "`id`",
        "x;id",
        "--",
        "--ro-bind",
        "ünïcode",
        "'quoted'",
        "a,b=c",
    ],
)
def test_names_and_arguments_are_no_options_of_the_launcher(
    launcher: LauncherName, name: str
) -> None:
    code = f"print(open({name!r}).read(), sys.argv[1:] == [{name!r}, '/', '/host'], os.path.exists('/host'))"
    found = run(launcher, code, files={name: "text"}, arguments=[name, "/", "/host"])
    assert found.stdout == "text True False\n"


@pytest.mark.parametrize(
    "name", ["", "/etc/x", "../x", "a/../../x", "a//b", "./x", "a/", "x\0y", "a\nb", "x" * 501]
)
def test_files_outside_of_the_working_directory_are_refused(name: str) -> None:
    with pytest.raises(CompoundError, match="not a path of a file below"):
        asyncio.run(Sandbox(SMALL).run("print(1)", files={name: "text"}))


@pytest.mark.parametrize(
    "files", [{"a": "", "a/b": ""}, {"main.py/x": ""}, {"a" * 300: ""}, {"f": "x" * (5 << 20)}]
)
def test_unwritable_files_fail_the_call(launcher: LauncherName, files: dict[str, str]) -> None:
    with pytest.raises(CompoundError, match="cannot be written"):
        run(launcher, "print('ran')", files=files)


def test_output_that_is_no_text_is_returned_as_text(launcher: LauncherName) -> None:
    found = run(launcher, "os.write(1, b'\\xff\\x00\\x1b[2J\\xed\\xa0\\x80')")
    assert found.ok
    found.stdout.encode("utf-8")


def test_output_that_imitates_a_failure_of_the_sandbox_is_a_result(launcher: LauncherName) -> None:
    code = "print('ready')\nprint('bwrap: setting up uid map: Permission denied', file=sys.stderr)\nos._exit(125)"
    found = run(launcher, code)
    assert (found.status, found.limit) == (125, "")


def test_environment_variables_of_python_and_the_loader_are_not_passed_on(
    launcher: LauncherName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('ESCAPED')", encoding="utf-8")
    for name in ("PYTHONPATH", "PYTHONSTARTUP", "PYTHONUSERBASE", "LD_LIBRARY_PATH", "PYTHONHOME"):
        monkeypatch.setenv(name, str(tmp_path))
    found = run(launcher, f"print({str(tmp_path)!r} in sys.path)")
    assert found.stdout == "False\n"


def test_modules_that_a_program_leaves_are_not_imported_by_the_next(launcher: LauncherName) -> None:
    code = """
for name in ("sitecustomize.py", "usercustomize.py", "x.pth", "json.py"):
    open(name, "w").write("print('ESCAPED')")
os.makedirs("/tmp/work/.local/lib/python3/site-packages")
"""
    assert run(launcher, code).ok
    assert run(launcher, "import json; print(json.dumps(1))").stdout == "1\n"
