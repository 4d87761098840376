"""The system calls that an engine may not make, as a seccomp filter.

A classic BPF program over `struct seccomp_data` (see `seccomp(2)`), written for the calls that
change the kernel, other processes, mounts or namespaces, or that read the kernel. A forbidden call
answers `EPERM`; `clone3` answers `ENOSYS`, upon which C libraries use `clone`, whose flags a filter
can read. Numbers: Linux's `syscall_64.tbl` and `asm-generic/unistd.h`.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""`BPF_LD|W|ABS`, `BPF_JMP|JEQ|K`, `BPF_JMP|JGE|K`, `BPF_JMP|JSET|K`, `BPF_RET|K`."""
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
"""Offsets in `struct seccomp_data`, of the low words on a little-endian machine."""
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_X32_BIT = 0x40000000
_NEW_NAMESPACE = 0x7E020080
"""`CLONE_NEW…` of user, pid, net, ipc, uts, cgroup, mount and time."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""`TIOCSTI` and `TIOCLINUX`: they type into a terminal."""


@dataclass(frozen=True, slots=True)
class _Machine:
    """An architecture: its audit number and the numbers of its system calls."""

    audit: int
    clone: int
    ioctl: int
    forbidden: Mapping[str, int]
    has_x32: bool = False


_COMMON: Mapping[str, int] = {
    "pidfd_getfd": 438,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
    "quotactl_fd": 443,
}
"""Since Linux 5.1 a call has the same number everywhere."""
_CLONE3 = 435
_MACHINES: Mapping[str, _Machine] = {
    "x86_64": _Machine(
        audit=0xC000003E,
        clone=56,
        ioctl=16,
        has_x32=True,
        forbidden={
            **_COMMON,
            "ptrace": 101,
            "syslog": 103,
            "vhangup": 153,
            "pivot_root": 155,
            "adjtimex": 159,
            "chroot": 161,
            "acct": 163,
            "settimeofday": 164,
            "mount": 165,
            "umount2": 166,
            "swapon": 167,
            "swapoff": 168,
            "reboot": 169,
            "sethostname": 170,
            "setdomainname": 171,
            "iopl": 172,
            "ioperm": 173,
            "init_module": 175,
            "delete_module": 176,
            "quotactl": 179,
            "clock_settime": 227,
            "kexec_load": 246,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "unshare": 272,
            "perf_event_open": 298,
            "name_to_handle_at": 303,
            "open_by_handle_at": 304,
            "clock_adjtime": 305,
            "setns": 308,
            "process_vm_readv": 310,
            "process_vm_writev": 311,
            "kcmp": 312,
            "finit_module": 313,
            "kexec_file_load": 320,
            "bpf": 321,
            "userfaultfd": 323,
        },
    ),
    "aarch64": _Machine(
        audit=0xC00000B7,
        clone=220,
        ioctl=29,
        forbidden={
            **_COMMON,
            "umount2": 39,
            "mount": 40,
            "pivot_root": 41,
            "chroot": 51,
            "vhangup": 58,
            "quotactl": 60,
            "acct": 89,
            "unshare": 97,
            "kexec_load": 104,
            "init_module": 105,
            "delete_module": 106,
            "clock_settime": 112,
            "syslog": 116,
            "ptrace": 117,
            "reboot": 142,
            "sethostname": 161,
            "setdomainname": 162,
            "settimeofday": 170,
            "adjtimex": 171,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "swapon": 224,
            "swapoff": 225,
            "perf_event_open": 241,
            "name_to_handle_at": 264,
            "open_by_handle_at": 265,
            "clock_adjtime": 266,
            "setns": 268,
            "process_vm_readv": 270,
            "process_vm_writev": 271,
            "kcmp": 272,
            "finit_module": 273,
            "bpf": 280,
            "userfaultfd": 282,
            "kexec_file_load": 294,
        },
    ),
}


def forbidden(machine: str | None = None) -> Mapping[str, int]:
    """Name → number of the calls that the filter forbids; empty where there is no filter."""
    found = _MACHINES.get(machine or platform.machine())
    return found.forbidden if found else {}


def filter_program(machine: str | None = None) -> bytes:
    """The filter for a kind of machine (`platform.machine()`), as `bwrap --seccomp` reads it.

    Empty for a machine whose numbers are not known here.
    """
    found = _MACHINES.get(machine or platform.machine())
    if found is None:
        return b""
    refused, unknown = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    steps: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, found.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if found.has_x32:
        steps += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, refused)]
    for number in found.forbidden.values():
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refused)]
    steps += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, unknown)]
    steps += _unless(found.clone, _FIRST_ARGUMENT, [(_ANY_BIT, _NEW_NAMESPACE)], refused)
    steps += _unless(
        found.ioctl, _SECOND_ARGUMENT, [(_EQUAL, code) for code in _TERMINAL_INPUT], refused
    )
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _unless(
    number: int, argument: int, tests: Sequence[tuple[int, int]], refused: int
) -> list[tuple[int, int, int, int]]:
    """Decide one call by an argument; the call number is loaded before and, for others, after."""
    body: list[tuple[int, int, int, int]] = [(_LOAD, 0, 0, argument)]
    for test, value in tests:
        body += [(test, 0, 1, value), (_RETURN, 0, 0, refused)]
    body.append((_RETURN, 0, 0, _ALLOW))
    return [(_EQUAL, 0, len(body), number), *body]


def filter_descriptor() -> int | None:
    """An open file with the filter, to be inherited by `bwrap --seccomp`; None = there is none."""
    program = filter_program()
    if not program:
        return None
    descriptor = os.memfd_create("seccomp")
    os.write(descriptor, program)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
