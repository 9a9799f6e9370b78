"""GPUs counted without torch, processes and devices of ranks."""

from __future__ import annotations

import pytest

from dtf.core.errors import ConfigError
from dtf.host import devices
from dtf.host.devices import Devices, allow_files, choose, device_of, processes

CPU, TWO = Devices("cpu", ()), Devices("cuda", (0, 1))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch):
    """`host(4, "0,2")`: a host with so many GPUs and that CUDA_VISIBLE_DEVICES."""

    def make(gpus: int, visible: str | None = None, cuda: bool = True) -> None:
        monkeypatch.setattr(devices, "_nvml_count", lambda: gpus)
        monkeypatch.setattr(devices, "_torch_has_cuda", lambda: cuda)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


@pytest.mark.parametrize(
    ("gpus", "visible", "count"),
    [
        (0, None, 0),
        (4, None, 4),
        (4, "0,2", 2),
        (4, "", 0),
        (4, "-1", 0),
        (4, "1,7,2", 1),
        (4, "GPU-8f2,MIG-1a", 2),
        (0, "0", 0),
        (4, "x,0", 0),
    ],
)
def test_visible_gpus_are_counted_as_cuda_does(host, gpus: int, visible: str | None, count: int) -> None:
    host(gpus, visible)
    assert devices.gpus() == count


def test_a_torch_without_cuda_sees_no_gpu(host) -> None:
    host(4, cuda=False)
    assert choose("auto") == CPU
    with pytest.raises(ConfigError, match="built without CUDA"):
        choose("cuda")


def test_this_hosts_count_needs_no_torch() -> None:
    import torch

    assert devices._torch_has_cuda() == (torch.version.cuda is not None)
    assert devices.gpus() == torch.cuda.device_count()


def test_devices_are_chosen_or_refused(host) -> None:
    host(2)
    assert choose("auto") == choose("cuda") == choose("0,1") == TWO
    assert choose("1") == Devices("cuda", (1,))
    assert choose("cpu") == CPU
    for asked, words in [
        ("0,2", "names GPU 2; there are 2, 0 to 1"),
        ("0,0", "twice"),
        ("gpu", "is no choice"),
        ("", "is no choice"),
    ]:
        with pytest.raises(ConfigError, match=words):
            choose(asked)
    host(0)
    assert choose("auto") == CPU
    with pytest.raises(ConfigError, match="no NVIDIA driver answers"):
        choose("0")
    host(2, "")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES= hides all"):
        choose("cuda")


def test_processes_are_one_per_gpu_and_two_without() -> None:
    assert processes("auto", TWO) == processes("auto", CPU) == 2
    assert processes("auto", Devices("cuda", (3,))) == 1
    assert processes(5, CPU) == 5


@pytest.mark.parametrize(
    ("before", "count", "after"),
    [
        ((1024, 4096), 1000, (1024, 4096)),
        ((1024, 4096), 2000, (2000, 4096)),
        ((20, 30), 2000, (30, 30)),
        ((20, -1), 2000, (2000, -1)),
        ((-1, -1), 2000, (-1, -1)),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_needed_and_allowed(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], count: int, after: tuple[int, int]
) -> None:
    limits = [before]
    monkeypatch.setattr(devices.resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(devices.resource, "setrlimit", lambda kind, pair: limits.append(pair))
    assert allow_files(count) == (after[0] if after[0] >= 0 else count)
    assert limits[-1] == after


def test_each_rank_has_a_gpu_of_its_own() -> None:
    chosen = Devices("cuda", (2, 0))
    assert [device_of(rank, 2, chosen) for rank in range(2)] == ["cuda:2", "cuda:0"]
    assert device_of(5, 8, CPU) == "cpu"
    with pytest.raises(ConfigError, match="launcher.processes=3 needs as many GPUs, there are 2"):
        device_of(0, 3, chosen)


def test_cores_respect_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5, 6, 7})
    for text, count in [
        ("max 100000", 8),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("2000000 100000", 8),
        ("nonsense", 8),
    ]:
        monkeypatch.setattr(devices.Path, "read_text", lambda path, text=text: text)
        assert devices.cores() == count


@pytest.mark.parametrize(
    ("ranks", "pins"),
    [
        (1, [[0, 4, 1, 5, 2, 6, 3, 7]]),
        (2, [[0, 4, 1, 5], [2, 6, 3, 7]]),
        (3, [[0, 4], [1, 5], [2, 6, 3, 7]]),
        (4, [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_ranks_divide_cores_and_not_their_hardware_threads(
    monkeypatch: pytest.MonkeyPatch, ranks: int, pins: list[list[int]]
) -> None:
    """4 cores of 2 hardware threads, as Linux numbers them: those of one core are 4 apart. Two sockets."""
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(devices, "_core_of", lambda number: (number % 4 // 2, number % 2))
    found = devices.divided_cores(ranks)
    assert sorted(number for pin in found for number in pin) == list(range(8)), "all cores, each once"
    assert len(found) == ranks and all(found)
    if ranks <= 4:
        assert found == pins
        assert all((number + 4) % 8 in pin for pin in found for number in pin), (
            "hardware threads of a core stay together"
        )


def test_more_ranks_than_cores_divide_hardware_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(devices, "_core_of", lambda number: (0, number % 2))
    assert devices.divided_cores(3) == [[0], [2], [1, 3]]


def test_cores_are_divided_within_the_affinity_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda pid: {3, 5})
    assert devices.divided_cores(2) == [[3], [5]]
    with pytest.raises(ConfigError, match=r"launcher.pin=true needs a core for each of 3 ranks, there are 2"):
        devices.divided_cores(3)
