"""What options of parameter servers may be. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dtf.api.registry import option
from dtf.core.errors import ConfigError
from dtf.pserver import manual_start


class Mode(Enum):
    sync = "sync"
    async_ = "async"
    half_async = "half_async"
    geo = "geo"


class Wire(Enum):
    same = "same"
    bf16 = "bf16"
    fp16 = "fp16"


class Dense(Enum):
    pserver = "pserver"
    allreduce = "allreduce"


class Role(Enum):
    server = "server"
    trainer = "trainer"


class Device(Enum):
    cpu = "cpu"
    cuda = "cuda"


class TlsMode(Enum):
    none = "none"
    tls = "tls"
    mtls = "mtls"


@dataclass(kw_only=True)
class TlsOptions:
    """Files in PEM, by which processes know each other on a network that others can reach."""

    mode: TlsMode = option(
        default=TlsMode.none,
        doc="`none`; `tls`: servers show a certificate, and what passes is encrypted; `mtls`: trainers show one too",
    )
    ca: str = option(
        default="", doc="who vouches for the others: the authority's certificate, or the one certificate that all have"
    )
    cert: str = option(
        default="",
        doc="this process's certificate, for the host as strategy.endpoints names it; trainers need one with mtls",
    )
    key: str = option(default="", doc="the private key of cert")

    @property
    def mutual(self) -> bool:
        return self.mode is TlsMode.mtls

    def files(self) -> dict[str, str]:
        """The paths of those that are given, by name; none without TLS."""
        given = {"ca": self.ca, "cert": self.cert, "key": self.key} if self.mode is not TlsMode.none else {}
        return {name: path for name, path in given.items() if path}

    def check(self, serves: bool, asks: bool) -> None:
        """Raise ConfigError where a file is missing that a process needs which serves others, or asks them."""
        if self.mode is TlsMode.none:
            given = [name for name in ("ca", "cert", "key") if getattr(self, name)]
            if given:
                raise ConfigError(
                    f"strategy.tls.{given[0]} is given and strategy.tls.mode=none uses no file; set it to tls or mtls"
                )
            return
        needed = ({"cert", "key"} if serves or self.mutual else set()) | ({"ca"} if asks or self.mutual else set())
        manual_start.check_files("strategy.tls", self.files(), sorted(needed))
