"""Which process of a run a command of `launcher=manual` starts, from options, else from the environment; its secret and
certificates. Torch-free.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dtf.api.schema import show
from dtf.core.errors import ConfigError
from dtf.host.devices import MOST_PROCESSES
from dtf.host.network import endpoint

ENDPOINTS, ROLE, ID, TOKEN = "DTF_ENDPOINTS", "DTF_ROLE", "DTF_ID", "DTF_TOKEN"
"""Variables that say which process of a run this is; see also `id_variable`."""

LEAST_TOKEN = 16
"""Least characters of a secret."""


def endpoints(given: Sequence[str]) -> list[str]:
    """The endpoints that are given, else those of the environment. ConfigError where there are none."""
    known = list(given) or [text.strip() for text in os.environ.get(ENDPOINTS, "").split(",") if text.strip()]
    if not known:
        raise ConfigError(
            "launcher.endpoints=[] says of no process where it listens; give launcher.endpoints=[HOST:PORT,...] or "
            f"{ENDPOINTS}, alike everywhere"
        )
    return known


def addresses(endpoints: Sequence[str]) -> list[tuple[str, int]]:
    """Host and port of each endpoint. ConfigError for one that is wrong or named twice."""
    parsed = [endpoint(text, "launcher.endpoints") for text in endpoints]
    if len(set(parsed)) < len(parsed):
        raise ConfigError(
            f"launcher.endpoints=[{','.join(endpoints)}] names one twice; give each process a port of its own"
        )
    return parsed


def id_variable(role: str) -> str:
    """The variable with the number of a process among those of its role, such as DTF_SERVER_ID; it comes before ID."""
    return f"DTF_{re.sub(r'[^0-9A-Za-z]', '_', role).upper()}_ID"


def refuse_environment(roles: Iterable[str]) -> None:
    """ConfigError where the environment says which process of a run with these roles this is, for launchers that start
    all of them.
    """
    name = next((name for name in (ENDPOINTS, ROLE, ID, *map(id_variable, roles)) if os.environ.get(name)), "")
    if name:
        raise ConfigError(
            f"{name}={os.environ[name]} is for launcher=manual, which starts one process of a run, and this launcher "
            f"starts all; use launcher=manual, or unset {name}"
        )


def role_of(given: str, roles: Mapping[str, int]) -> str:
    """The role of this process: `given`, else that of the environment. `roles`: as of `Strategy.roles`.

    ConfigError where it is missing or wrong.
    """
    role = given or os.environ.get(ROLE, "")
    if role in roles:
        return role
    shown = f"launcher.role={given}" if given else f"{ROLE}={role}" if role else "launcher.role is not given"
    raise ConfigError(
        f"{shown}, and each command of launcher=manual starts one process; give "
        f"{' or '.join(f'launcher.role={name}' for name in roles)}"
    )


def number_of(given: int | None, role: str, listening: int | None) -> int:
    """The number of this process among those of its role: `given`, else that of the environment. `listening`: how many
    there are, where each has an endpoint; None: any number is right that no other process has.

    ConfigError where it is missing or wrong.
    """
    variables = id_variable(role), ID
    variable = next((name for name in variables if os.environ.get(name)), variables[0])  # an empty one is not set
    text = str(given) if given is not None else os.environ.get(variable) or ("0" if listening == 1 else "")
    if not text:
        raise ConfigError(
            f"launcher.id is not given, and each {role} needs one, from 0 on; give launcher.id=N or "
            f"{' or '.join(variables)}"
        )
    shown = f"{variable}={show(text)}" if given is None else f"launcher.id={text}"
    number = int(text) if re.fullmatch(r"[+-]?[0-9]{1,9}", text) else None
    if number is None:
        raise ConfigError(f"{shown} must be a whole number: the number of this {role}, from 0 on")
    if listening is not None and not 0 <= number < listening:
        raise ConfigError(
            f"{shown} must be 0 to {listening - 1}: launcher.endpoints names {listening} {role}{'s' * (listening > 1)}"
        )
    if not 0 <= number < MOST_PROCESSES:
        raise ConfigError(f"{shown} must be 0 to {MOST_PROCESSES - 1}: a number that no other {role} has")
    return number


def token(file: str) -> str:
    """The secret of the run, from `file` or the environment.

    ConfigError where there is none, and for a file that others may read.
    """
    how = "openssl rand -hex 32"
    if not file and not os.environ.get(TOKEN):
        raise ConfigError(
            "processes of launcher=manual know each other by a secret, and none is given; make one and set it for all: "
            f"export {TOKEN}=$({how}), or (umask 077; {how} > FILE) and launcher.token_file=FILE"
        )
    text = os.environ.get(TOKEN, "")
    if file:
        try:
            status, text = os.stat(file), Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"launcher.token_file={file} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}"
            ) from None
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(
                f"launcher.token_file={file} can be read by others (mode {stat.S_IMODE(status.st_mode):o}); chmod 600 "
                "it, and make a new secret"
            )
    if len(text) < LEAST_TOKEN or not text.isascii() or not text.isprintable():
        raise ConfigError(
            f"the secret of {f'launcher.token_file={file}' if file else TOKEN} must be at least {LEAST_TOKEN} "
            f"printable characters; {how}"
        )
    return text


def check_loopback(endpoints: Sequence[str]) -> None:
    """ConfigError unless all endpoints are on this host's loopback."""
    for text, (host, port) in zip(endpoints, addresses(endpoints), strict=True):
        try:
            resolved = {
                str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            }
        except OSError as error:
            raise ConfigError(
                f"launcher.endpoints: {host} is not known here: {error.strerror}; use an IP address, or a name that "
                "resolves"
            ) from None
        if not all(ipaddress.ip_address(address).is_loopback for address in resolved):
            raise ConfigError(
                f"launcher.endpoints names {text}, beyond this host, and what passes would not be encrypted; set "
                "launcher.tls.mode to tls or mtls, "
                "or launcher.allow_insecure=true on a network that no stranger reaches"
            )


def check_files(node: str, files: Mapping[str, str], needed: Sequence[str]) -> None:
    """ConfigError where one of the files is not given or cannot be read."""
    for name in needed:
        if name not in files:
            raise ConfigError(f"{node}.{name} is not given, and this process needs it; give the path of a file in PEM")
    for name, path in files.items():
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{node}.{name}={path} cannot be read: {error.strerror}") from None


def check_certificates(node: str, files: Mapping[str, str]) -> None:
    """ConfigError where readable files are no certificates, or a key does not belong to its certificate."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if "ca" in files:
            context.load_verify_locations(files["ca"])
    except ssl.SSLError:
        raise ConfigError(f"{node}.ca={files['ca']} holds no certificate; give a file in PEM") from None
    try:
        if "cert" in files and "key" in files:
            # with a password, else a key that has one asks for it on the terminal
            context.load_cert_chain(files["cert"], files["key"], "")
    except (ssl.SSLError, ValueError):
        raise ConfigError(
            f"{node}.cert={files['cert']} and {node}.key={files['key']} are no certificate and its key, without a "
            "password, in PEM"
        ) from None
