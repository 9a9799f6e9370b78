"""How much memory is left, as the host and control groups say."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtf.host import memory


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


HOST = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:      100 kB\n"}


def test_nothing_is_known(root: Path) -> None:
    assert memory.available_bytes() is None


def test_the_host(root: Path) -> None:
    write(root, HOST)
    assert memory.available_bytes() == 102_400


def test_a_group_and_those_around_it(root: Path) -> None:
    write(root, HOST | {"proc/self/cgroup": "0::/job/step\n"})
    inner, outer = "sys/fs/cgroup/job/step/", "sys/fs/cgroup/job/"
    write(root, {f"{inner}memory.max": "max\n", f"{inner}memory.current": "10\n", f"{inner}memory.stat": ""})
    assert memory.available_bytes() == 102_400
    write(root, {f"{outer}memory.max": "5000\n", f"{outer}memory.current": "3000\n"})
    write(root, {f"{outer}memory.stat": "anon 2500\ninactive_file 400\n"})
    assert memory.available_bytes() == 2400


def test_inside_a_container_the_folder_is_the_group(root: Path) -> None:
    write(root, HOST | {"proc/self/cgroup": "0::/../elsewhere\n"})
    top = "sys/fs/cgroup/"
    write(root, {f"{top}memory.max": "700", f"{top}memory.current": "900", f"{top}memory.stat": ""})
    assert memory.available_bytes() == 0


def test_the_first_version(root: Path) -> None:
    write(root, HOST | {"proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n"})
    own = "sys/fs/cgroup/memory/x/"
    write(root, {f"{own}memory.limit_in_bytes": "800", f"{own}memory.usage_in_bytes": "300", f"{own}memory.stat": ""})
    assert memory.available_bytes() == 500


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    left = memory.available_bytes()
    assert left is not None and left > 1 << 20
