"""`job.forms=[onnx]`: a model as an ONNX file, and what ONNX Runtime makes of it."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map

from dtf.core.errors import ConfigError

MOST_BYTES = (1 << 31) - 1
"""Of an ONNX file in one piece: it is one protobuf message."""

OTHERWISE = "use job.forms=[pt2,safetensors]"


def write_onnx(
    path: Path, program: ExportedProgram, inputs: Any, outputs: Any, metadata: dict[str, str], threads: int
) -> Callable[[Any], list[Tensor]]:
    """Write an exported program as an ONNX file. Returns what ONNX Runtime says of inputs, on the CPU: the outputs in
    the order of the model's.

    `inputs`, `outputs`: of the model, for the names of the file's. ConfigError where the model has an operation that
    ONNX does not have, or ONNX Runtime has not, or is too large.
    """
    size = sum(tensor.nbytes for tensor in program.state_dict.values() if isinstance(tensor, Tensor))
    if size > MOST_BYTES:
        raise ConfigError(
            f"job.forms=[onnx]: the model has {size:,} bytes, and an ONNX file 2 GiB at most; {OTHERWISE}"
        )
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it tells of its progress, and that several inputs have one batch size
            onnx = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                dynamic_shapes=(tree_map(lambda _: {0: "batch"}, inputs),),
                input_names=names(inputs, "inputs"),
                output_names=names(outputs, "outputs"),
            )
        assert onnx is not None
        onnx.model.metadata_props.update(metadata)
        onnx.save(path, external_data=False)
    except torch.onnx.OnnxExporterError as error:
        raise ConfigError(f"ONNX cannot hold this model: {_reason(error)}; {OTHERWISE}") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its classes have no name that is public
        raise ConfigError(f"ONNX Runtime cannot run this model: {_reason(error)}; {OTHERWISE}") from error
    wanted = [value.name for value in session.get_inputs()]

    def run(inputs: Any) -> list[Tensor]:
        given = dict(zip(wanted, (leaf.numpy() for leaf in tree_leaves(inputs)), strict=True))
        return [torch.from_numpy(output) for output in session.run(None, given)]

    return run


def names(values: Any, name: str) -> list[str] | None:
    """What the tensors of a model's inputs or outputs are called in the file; None: as torch calls them."""
    if isinstance(values, Tensor):
        return [name]
    if isinstance(values, dict) and all(isinstance(value, Tensor) for value in values.values()):
        return list(values)
    return None


def _reason(error: BaseException) -> str:
    """What went wrong first, in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
