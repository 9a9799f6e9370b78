"""What is submitted, in one zip file: config files, command line, resolved config, code of plugins, versions.

A job that waits for a week runs what was submitted. `python -m dtf --bundle FILE` runs it anywhere.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.cluster.plugin_code import MOST_BYTES, code_of
from dtf.config.importable import plugins_of
from dtf.core.author_line import DTF
from dtf.core.errors import ConfigError, DataError, SaveError
from dtf.core.own_code import dtf_digest
from dtf.core.text import bytes_text
from dtf.core.version import __version__
from dtf.host.scratch import scratch_folder
from dtf.runs.run_folder import versions

if TYPE_CHECKING:
    from dtf.config.compose import Composed

_MANIFEST, _CONF, _CODE = "bundle.json", "conf", "code"
_DATE = (1980, 1, 1, 0, 0, 0)  # the same files make the same bytes


@dataclass(frozen=True)
class BundledRun:
    """One run: its overrides, its resolved config, and its folder as the job sees it."""

    overrides: list[str]
    config: dict[str, Any]
    run_dir: str


@dataclass(frozen=True)
class Bundle:
    """`runs`: one, or the trials of a sweep. `directory`: where it was submitted; "" where the job does not see that
    folder. `token`: a secret that the job's processes share. `config_name`: of the root config, "" for dtf's own.
    `grace_s`: what the scheduler was told that a save may take after a notice, see `JobRequest`. `dtf`: the digest of
    dtf's own code, and where it lay.
    """

    runs: list[BundledRun]
    config_name: str
    directory: str
    token: str
    grace_s: float
    versions: dict[str, str]
    dtf: tuple[str, str]

    @classmethod
    def of(
        cls, composed: Sequence[Composed], run_dirs: Sequence[str], directory: str, token: str, grace_s: float
    ) -> Bundle:
        """Of runs that were composed by one composer."""
        composer = composed[0].composer
        runs = [
            BundledRun(
                [word for word in one.overrides if not word.startswith("run.dir=")],
                one.config
                | {"run": one.config["run"] | {"dir": run_dir}},  # given by the user or chosen: no difference
                run_dir,
            )
            for one, run_dir in zip(composed, run_dirs, strict=True)
        ]
        name = composer.config_name if composer.config_dir else ""
        return cls(runs, name, directory, token, grace_s, versions(), (dtf_digest(), DTF))

    def to_bytes(self, composed: Sequence[Composed]) -> bytes:
        """The zip file. ConfigError when the code of plugins, or what lies in the config dir, is too much."""
        modules = {name for one in composed for name in [*one.config["plugins"], *plugins_of(one.config)]}
        files = {f"{_CODE}/{name}": path for name, path in code_of(sorted(modules)).items()}
        if folder := composed[0].composer.config_dir:
            files |= {f"{_CONF}/{path.relative_to(folder)}": path for path in _config_files(Path(folder))}
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(zipfile.ZipInfo(_MANIFEST, _DATE), json.dumps(asdict(self)), zipfile.ZIP_DEFLATED)
            for name, path in files.items():
                archive.writestr(zipfile.ZipInfo(name, _DATE), path.read_bytes(), zipfile.ZIP_DEFLATED)
        return content.getvalue()


@dataclass(frozen=True)
class Unpacked:
    """A bundle in a folder of this machine. `code`: what belongs first on sys.path; `conf`: a config dir, or None."""

    bundle: Bundle
    code: Path
    conf: Path | None


@contextmanager
def unpacked(path: Path, digest: str) -> Iterator[Unpacked]:
    """A context with the bundle's files in a temporary folder. `digest`: what the file must have; "": any.

    DataError for a file that is not there or no bundle, ConfigError for one that is not what was submitted, SaveError
    for what may pass, such as a full disk here.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        raise DataError(f"--bundle={path} cannot be read: {error.strerror}") from error
    except OSError as error:
        raise _passing(path, error) from error
    if digest and digest_of(content) != digest:
        raise ConfigError(
            f"--bundle={path} is not what was submitted: it has the digest {digest_of(content)}, not {digest}; submit "
            "the run again"
        )
    with scratch_folder("dtf-bundle-") as scratch:
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                archive.extractall(scratch)
            manifest = json.loads((scratch / _MANIFEST).read_text())
            if missing := [field.name for field in fields(Bundle) if field.name not in manifest]:
                was = f"dtf {manifest['versions']['dtf']}"
                raise ConfigError(
                    f"--bundle={path} was submitted by an earlier {was}, which did not write its {missing[0]}, and "
                    f"this is dtf {__version__}; install that dtf here, or submit the run again"
                )
            runs = [BundledRun(**run) for run in manifest["runs"]]
            bundle = Bundle(**{**manifest, "runs": runs, "dtf": tuple(manifest["dtf"])})
        except (zipfile.BadZipFile, FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"--bundle={path} is no bundle of dtf: {type(error).__name__}: {error}") from error
        except OSError as error:
            raise _passing(path, error) from error
        conf = scratch / _CONF
        yield Unpacked(bundle, scratch / _CODE, conf if os.path.isdir(conf) else None)


def _config_files(folder: Path) -> list[Path]:
    """The YAML files of a config dir. Those in run folders, which a config dir such as `.` has too, are none of it."""
    found: list[Path] = []
    for name, folders, files in os.walk(folder):
        if "run.json" in files:
            folders.clear()
            continue
        folders[:] = sorted(inner for inner in folders if not inner.startswith("."))
        found += [Path(name, file) for file in sorted(files) if file.endswith(".yaml")]
    size = sum(path.stat().st_size for path in found)
    if size > MOST_BYTES:
        raise ConfigError(
            f"--config-dir={folder} has {bytes_text(size)} in {len(found)} YAML files; a job takes "
            f"{bytes_text(MOST_BYTES)} along: give a folder of config files alone"
        )
    return found


def _passing(path: Path, error: OSError) -> SaveError:
    where = f" ({error.filename})" if error.filename else ""
    return SaveError(f"--bundle={path} cannot be unpacked now: {error.strerror or error}{where}; start the job again")


def digest_of(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()
