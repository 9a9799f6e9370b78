"""Which environment variables a config file may set for ranks.

Many variables make a program run other code: `PYTHONPATH`, `LD_PRELOAD`, plugins of NCCL and OpenMP, caches of compiled
code. So a file sets those of a list alone, and the command line sets any.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dtf.api.schema import KeyProblem, show
from dtf.config.advice import CommandLine
from dtf.config.messages import parse

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_KEY = "launcher.env"
FROM_FILES = {
    "OMP": "PROC_BIND PLACES SCHEDULE DYNAMIC WAIT_POLICY THREAD_LIMIT MAX_ACTIVE_LEVELS STACKSIZE",
    "GOMP": "CPU_AFFINITY SPINCOUNT",
    "KMP": "AFFINITY BLOCKTIME",
    "MKL": "DYNAMIC",
    "OPENBLAS": "NUM_THREADS",
    "MALLOC": "ARENA_MAX MMAP_THRESHOLD_ TOP_PAD_ TRIM_THRESHOLD_",
    "CUDA": "VISIBLE_DEVICES DEVICE_ORDER DEVICE_MAX_CONNECTIONS LAUNCH_BLOCKING MODULE_LOADING",
    "CUBLAS": "WORKSPACE_CONFIG",
    "NCCL": "DEBUG DEBUG_SUBSYS SOCKET_IFNAME SOCKET_FAMILY SOCKET_NTHREADS NSOCKS_PERTHREAD IB_DISABLE IB_HCA "
    "IB_GID_INDEX IB_TIMEOUT IB_RETRY_CNT IB_SL IB_TC IB_QPS_PER_CONNECTION P2P_DISABLE P2P_LEVEL SHM_DISABLE "
    "NET_GDR_LEVEL CROSS_NIC ALGO PROTO BUFFSIZE NTHREADS MIN_NCHANNELS MAX_NCHANNELS NVLS_ENABLE CUMEM_ENABLE",
    "GLOO": "SOCKET_IFNAME",
    "THP": "MEM_ALLOC_ENABLE",
    "TORCH": "CPP_LOG_LEVEL DISTRIBUTED_DEBUG SHOW_CPP_STACKTRACES NCCL_BLOCKING_WAIT NCCL_ASYNC_ERROR_HANDLING "
    "NCCL_HIGH_PRIORITY NCCL_AVOID_RECORD_STREAMS NCCL_TRACE_BUFFER_SIZE",
    "PYTORCH": "CUDA_ALLOC_CONF ALLOC_CONF",
}
"""First word -> the rest, of the variables that a file may set: numbers, levels and names of devices. None names a
file, a library, a module or an address.
"""

_NAMES = {f"{first}_{rest}" for first, names in FROM_FILES.items() for rest in names.split()}


def refuse_variables(config: dict[str, Any], given: CommandLine, typed: Iterable[str]) -> None:
    """Raise KeyProblem for a variable of `launcher.env` that a file sets and may not.

    `typed`: the overrides as a person typed them. A sweep has others, which may come from a file.
    """
    from_elsewhere = config["launcher"].get("env", {}).keys() - _NAMES
    if not from_elsewhere:
        return
    for override in parse(list(typed), given.loader):
        from_elsewhere -= _named(override)
    for name in sorted(from_elsewhere):
        places = given.places(f"{_KEY}.{name}")
        if places and places[-1].is_default:  # of the class
            continue
        raise KeyProblem(
            f"{_KEY}.{name}",
            f"{_KEY} has {show(name)}, which no config file may set, as variables can make other code run; take it out "
            f"of the file and give {_KEY}.{name}=VALUE on the command line",
        )


def _named(override: Override) -> set[str]:
    """The variables that an override names."""
    key, value = override.key_or_group, override.value()
    if key.startswith(f"{_KEY}."):
        return {key.removeprefix(f"{_KEY}.")}
    node = value.get("env") if key == "launcher" and isinstance(value, dict) else value if key == _KEY else None
    return set(map(str, node)) if isinstance(node, dict) else set()
