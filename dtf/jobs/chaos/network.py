"""A network of a trial's own, which can be cut and joined: a network namespace with nothing but loopback in it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

_CLONE_NEWUSER, _CLONE_NEWNET = 0x1000_0000, 0x4000_0000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def enter_namespace() -> None:
    """Give this process a network of its own, with loopback up. OSError where that is not permitted.

    A process that is not root becomes root of a user namespace of its own, where that is permitted.
    """
    user, group, libc = os.getuid(), os.getgid(), ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET if user == 0 else _CLONE_NEWUSER | _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"a network namespace: {os.strerror(ctypes.get_errno())}")
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    switch_loopback(True)


def switch_loopback(up: bool) -> None:
    """Cut or join the network of the namespace this process is in."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(handle, _SIOCGIFFLAGS, request))[1]
        flags = flags | _IFF_UP if up else flags & ~_IFF_UP
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))


def refused() -> str:
    """Why there can be no namespace here; empty where there can."""
    pid = os.fork()
    if not pid:
        try:
            enter_namespace()
        except OSError:
            os._exit(1)
        os._exit(0)
    return "network namespaces are not permitted here" if os.waitpid(pid, 0)[1] else ""


def serve_switch(commands: int) -> None:
    """Fork a process that cuts (`0`) or joins (`1`) the network of this namespace, as the pipe `commands` says, until
    it is closed.
    """
    child = os.fork()
    if child:
        os.close(commands)
        os.waitpid(child, 0)
        return
    if os.fork():  # so that it is no child of the run
        os._exit(0)
    try:
        while command := os.read(commands, 1):
            switch_loopback(command == b"1")
    finally:
        os._exit(0)
