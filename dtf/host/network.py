"""Addresses and network interfaces of this host. Torch-free. Sends nothing."""

from __future__ import annotations

import fcntl
import re
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from dtf.core.errors import ConfigError
from dtf.core.text import suggest

_SIOCGIFADDR = 0x8915
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def endpoint(text: str, key: str, least: int = 1) -> tuple[str, int]:
    """Host and port from `host:port` or `[v6]:port`. ConfigError that names the key for other texts.

    `least`: the lowest port; 0 where the kernel may choose one.
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)\]|([^:\[\]\s]+)):([0-9]{1,5})", text)
    if not match or not least <= int(match[3]) < 65536:
        raise ConfigError(
            f"{key}={text} must be HOST:PORT, such as 10.0.0.1:29500, or [ADDRESS]:PORT with an IPv6 address"
        )
    return match[1] or match[2], int(match[3])


def endpoint_text(host: str, port: int) -> str:
    """Inverse of `endpoint`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_interface(name: str) -> None:
    """Raise ConfigError unless `launcher.interface` is a network interface of this host, or empty."""
    known = [interface for _, interface in socket.if_nameindex()]
    if name and name not in known:
        raise ConfigError(f"launcher.interface={name} is no network interface of this host; {suggest(name, known)}")


def socket_variables(interface: str, towards: tuple[str, int], environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that select the network interface of gloo and NCCL. With `launcher.interface`, that one for
    both. Else, for gloo, the interface towards rank 0, unless the environment selects one.

    By itself gloo takes the interface of the host's name, which is often loopback or unknown. NCCL looks for the
    fastest, so nothing is selected for it.
    """
    if interface:
        return {_GLOO: interface, _NCCL: interface}
    if _GLOO in environment:
        return {}
    try:
        interface_name = interface_of(own_address(*towards))
    except OSError:
        return {}
    return {_GLOO: interface_name} if interface_name else {}


def loopback_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The same variables for a run on this host alone, without `launcher.interface`."""
    return {name: environment.get(name, "lo") for name in (_GLOO, _NCCL)}


def own_address(host: str, port: int) -> str:
    """The address of this host from which packets to `host` are sent.

    OSError for an unknown name, and where no route exists.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # of a datagram socket: chooses the way, sends nothing
        return probe.getsockname()[0]


def interface_of(address: str) -> str:
    """The network interface that has this address; empty when none is found."""
    if ":" in address:
        known = Path("/proc/net/if_inet6")
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        lines = [line.split() for line in known.read_text().splitlines()] if known.exists() else []
        return next((line[-1] for line in lines if line[0] == packed), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                record = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(record[20:24]) == address:
                return name
    return ""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on one address of this host. Port 0: the kernel chooses. OSError when that is impossible."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(target[:2], family=family, backlog=1024)
