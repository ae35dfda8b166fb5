"""The system calls that a sandboxed program may make, compiled to a seccomp filter by libseccomp.

The filter allows what is listed and answers ENOSYS to all others, also to those that are newer than this
list: ptrace, mount, keyctl, bpf, userfaultfd, perf_event_open, io_uring_setup and the like. ENOSYS makes
libraries fall back to older calls. System calls of another architecture (32 bit) end the program.

Also refused is what acts on visible files or on limits that other processes of the same user share: leases,
locks, watches (inotify, epoll), timers that the kernel counts by user, advice that empties the page cache.
"""

from __future__ import annotations

import errno
import functools
import tempfile

from compound.errors import MissingExtra, SandboxUnavailable

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
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6; AF_VSOCK and AF_NETLINK do not depend on the namespace
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
    """Return the program of the filter for this machine's architecture.

    Raises:
        MissingExtra: pyseccomp is not installed.
        SandboxUnavailable: libseccomp is not installed.
    """
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
    program.add_rule(pyseccomp.ALLOW, "prlimit64", pyseccomp.Arg(0, equal, _LOW, 0))  # its own limits
    for call, place, values in (("ioctl", 1, _REQUESTS), ("fcntl", 1, _COMMANDS), ("madvise", 2, _ADVICE)):
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
