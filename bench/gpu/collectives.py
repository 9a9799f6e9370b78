"""NCCL in a group of one rank: every collective that strategies use, through the same group that they join, and torch's
wrappers on it. Two ranks on one GPU are refused by NCCL: how they agree is proven with gloo, see `shared`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.gpu import device
from bench.gpu.job import Job


def run(job: Job) -> None:
    place = device.name(job.rehearsed)
    backend = "gloo" if job.rehearsed else "cpu:gloo,cuda:nccl"  # as World.join names it
    if not job.rehearsed:
        torch.cuda.set_device(place)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        for name, check in CHECKS.items():
            try:
                ok = check(place)
                device.settle()
                job.lines.part(name, ok, "" if ok else "wrong numbers")
            except Exception as error:  # noqa: BLE001 (each is told, and the others are tried)
                job.lines.part(name, False, f"{type(error).__name__}: {str(error)[:400]}")
    finally:
        dist.destroy_process_group()


def _rows(place: str) -> torch.Tensor:
    return torch.arange(6.0, device=place)


def _all_reduce(place: str) -> bool:
    rows = _rows(place)
    dist.all_reduce(rows)
    return rows.equal(_rows(place))


def _cpu_channel(place: str) -> bool:
    rows = torch.ones(3, dtype=torch.float64)
    dist.all_reduce(rows)
    return bool((rows == 1).all())


def _average(place: str) -> bool:
    if place == "cpu":
        return True  # gloo cannot
    rows = _rows(place)
    dist.all_reduce(rows, op=dist.ReduceOp.AVG)
    return rows.equal(_rows(place))


def _broadcast(place: str) -> bool:
    rows = _rows(place)
    work = dist.broadcast(rows, src=0, async_op=True)
    assert work is not None
    work.wait()
    return rows.equal(_rows(place))


def _gather(place: str) -> bool:
    out = torch.empty(6, device=place)
    dist.all_gather_into_tensor(out, _rows(place))
    return out.equal(_rows(place))


def _scatter(place: str) -> bool:
    out = torch.empty(6, device=place)
    dist.reduce_scatter_tensor(out, _rows(place))
    return out.equal(_rows(place))


def _exchange(place: str) -> bool:
    out = torch.empty(6, device=place)
    dist.all_to_all_single(out, _rows(place))
    return out.equal(_rows(place))


def _barrier(place: str) -> bool:
    dist.barrier()
    return True


def _ddp(place: str) -> bool:
    """dtf's own wrapper, with the hook that sums gradients."""
    from dtf.strategies.ddp import _sum_gradients, wrap_ddp

    model = nn.Linear(6, 2).to(place)
    wrapped = wrap_ddp(model)
    _sum_gradients(wrapped)
    rows = _rows(place)
    for _ in range(2):  # buckets are laid out anew after the first pass
        model.zero_grad()
        wrapped(rows).sum().backward()
    return model.weight.grad is not None and model.weight.grad.equal(torch.stack([rows, rows]))


def _fsdp(place: str) -> bool:
    return _sharded(place, offload=False)


def _fsdp_offload(place: str) -> bool:
    return place == "cpu" or _sharded(place, offload=True)


def _sharded(place: str, offload: bool) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    rows = _rows("cpu")
    plain(rows).sum().backward()
    expected = plain[0].weight.grad.clone()
    plain.zero_grad()
    model = plain if offload else plain.to(place)
    mesh = init_device_mesh(place.partition(":")[0], (1,))
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for module in (*model, model):
        fully_shard(module, mesh=mesh, offload_policy=policy)
    model(rows.to(place)).sum().backward()
    gradient = model[0].weight.grad
    held = gradient.to_local()
    where = "cpu" if offload else place.partition(":")[0]
    return held.device.type == where and torch.allclose(held.cpu(), expected, rtol=1e-4)


CHECKS: dict[str, Callable[[str], bool]] = {
    "all-reduce on the device": _all_reduce,
    "all-reduce on the CPU channel of the same group": _cpu_channel,
    "average": _average,
    "broadcast": _broadcast,
    "all-gather": _gather,
    "reduce-scatter": _scatter,
    "all-to-all": _exchange,
    "barrier": _barrier,
    "DistributedDataParallel as dtf wraps it": _ddp,
    "FSDP2": _fsdp,
    "FSDP2 with parameters on the host": _fsdp_offload,
}
