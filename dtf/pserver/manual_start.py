"""Which process of a run an externally started command is: from options, else from the environment. Torch-free."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dtf.core.errors import ConfigError
from dtf.host.network import endpoint

ENDPOINTS, ROLE, SERVER_ID, TRAINER_ID, TOKEN = (
    "DTF_ENDPOINTS",
    "DTF_ROLE",
    "DTF_SERVER_ID",
    "DTF_TRAINER_ID",
    "DTF_TOKEN",
)
LEAST_TOKEN = 16
"""Least characters of a secret."""


def endpoints() -> list[str]:
    """The endpoints of the environment."""
    return [text.strip() for text in os.environ.get(ENDPOINTS, "").split(",") if text.strip()]


def addresses(endpoints: Sequence[str]) -> list[tuple[str, int]]:
    """Host and port of each endpoint. ConfigError for one that is wrong or named twice."""
    parsed = [endpoint(text, "strategy.endpoints") for text in endpoints]
    if len(set(parsed)) < len(parsed):
        raise ConfigError(
            f"strategy.endpoints=[{','.join(endpoints)}] names one twice; give each server a port of its own"
        )
    return parsed


def role_and_number(role: str, server_id: int | None, trainer_id: int | None, servers: int) -> tuple[str, int]:
    """Role of this process, and its number among those of the role; what is not given comes from the environment.

    ConfigError where one is missing or wrong.
    """
    role = role or os.environ.get(ROLE, "")
    if role not in ("server", "trainer"):
        shown = f"{ROLE}={role}" if role else "strategy.role is not given"
        raise ConfigError(
            f"{shown}, and with strategy.endpoints each command starts one process; give strategy.role=server or "
            "strategy.role=trainer"
        )
    key, variable, option = (
        ("server_id", SERVER_ID, server_id) if role == "server" else ("trainer_id", TRAINER_ID, trainer_id)
    )
    other = trainer_id if role == "server" else server_id
    if other is not None:
        raise ConfigError(
            f"strategy.{'trainer_id' if role == 'server' else 'server_id'}={other} is not for strategy.role={role}; "
            f"give strategy.{key}"
        )
    text = (
        str(option)
        if option is not None
        else os.environ.get(variable, "0" if role == "server" and servers == 1 else "")
    )
    if not text.isdecimal() or len(text) > 6:
        shown = f"{variable}={text} is no number" if text else f"strategy.{key} is not given"
        raise ConfigError(
            f"{shown}, and an externally started {role} needs one, from 0 on; give strategy.{key}=N or {variable}"
        )
    if role == "server" and int(text) >= servers:
        raise ConfigError(
            f"strategy.server_id={text} must be less than the {servers} of strategy.endpoints; servers are counted "
            "from 0"
        )
    return role, int(text)


def refuse_without_endpoints(role: object, server_id: int | None, trainer_id: int | None) -> None:
    """ConfigError where an option says which process this is, and none where the servers are."""
    options = [
        key
        for key, value in (("role", role), ("server_id", server_id), ("trainer_id", trainer_id))
        if value is not None
    ]
    if options:
        raise ConfigError(
            f"strategy.{options[0]} is for processes started externally; give strategy.endpoints=[HOST:PORT,...] too, "
            "or leave it out"
        )


def token(file: str) -> str:
    """The secret of the run, from `file` or the environment.

    ConfigError where there is none, and for a file that others may read.
    """
    how = "openssl rand -hex 32"
    if not file and not os.environ.get(TOKEN):
        raise ConfigError(
            "processes started externally know each other by a secret, and none is given; make one and set it for all: "
            f"export {TOKEN}=$({how}), or (umask 077; {how} > FILE) and strategy.token_file=FILE"
        )
    text = os.environ.get(TOKEN, "")
    if file:
        try:
            status, text = os.stat(file), Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"strategy.token_file={file} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}"
            ) from None
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(
                f"strategy.token_file={file} can be read by others (mode {stat.S_IMODE(status.st_mode):o}); chmod 600 "
                "it, and make a new secret"
            )
    if len(text) < LEAST_TOKEN or not text.isascii() or not text.isprintable():
        raise ConfigError(
            f"the secret of {f'strategy.token_file={file}' if file else TOKEN} must be at least {LEAST_TOKEN} "
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
                f"strategy.endpoints: {host} is not known here: {error.strerror}; use an IP address, or a name that "
                "resolves"
            ) from None
        if not all(ipaddress.ip_address(address).is_loopback for address in resolved):
            raise ConfigError(
                f"strategy.endpoints names {text}, beyond this host, and what passes would not be encrypted; set "
                "strategy.tls.mode to tls or mtls, "
                "or strategy.allow_insecure=true on a network that no stranger reaches"
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


def check_name(node: str, files: Mapping[str, str], host: str) -> None:
    """ConfigError where clients that trust `ca` would refuse a server at `host` that shows `cert`.

    Tried by a TLS handshake in memory.
    """
    client_context, server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client_context.load_verify_locations(files["ca"])
    server_context.load_cert_chain(files["cert"], files["key"], "")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = (
        client_context.wrap_bio(to_client, to_server, server_hostname=host),
        server_context.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        for side in (client, server, client):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"{node}.cert={files['cert']} does not do for {host}, by {node}.ca={files['ca']}: {error.verify_message}"
        ) from None
