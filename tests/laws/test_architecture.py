"""The shape of the code: who may import whom, what starts without torch, and calls that would run code from data."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml

import dtf
from dtf.config.settings import _PARTS
from tests.support.ranks import MORE, ranks

ROOT = Path(__file__).parents[2]

PARTS = {"strategies", "observers", "launch", "jobs"}
NO_NAMES = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}
OBJECT_COLLECTIVES = ("_object", "_object_list")
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


@cache
def rooms() -> ModuleType:
    """docs/rooms.py, the command that prints rooms and arrows and fails where one breaks the rules."""
    spec = importlib.util.spec_from_file_location("rooms", ROOT / "docs" / "rooms.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def sources() -> dict[str, Path]:
    """Module name -> file, of everything that is shipped."""
    return rooms().source_files()


@cache
def imports() -> dict[str, set[str]]:
    """Module name -> the modules of dtf that it imports."""
    return rooms().imports_of(sources())


def tree(path: Path) -> ast.Module:
    return rooms().tree(path)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but what stands under `if TYPE_CHECKING:`, which does not run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and dotted(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from walk(child)


def test_rooms_import_downwards_and_never_in_a_circle() -> None:
    assert not rooms().upward(imports())
    assert not rooms().circles(imports())
    assert not rooms().unknown(sources())


def test_only_jobs_and_registries_name_the_parameter_server() -> None:
    """Its needs are optional parts of the contracts, and its processes started by hand a launcher."""
    registries = {"dtf", "dtf.config.settings", "dtf.config.elsewhere", "dtf.core.renamed"}
    for name, path in sources().items():
        if rooms().room_of(name) not in ("pserver", "jobs") and name not in registries:
            # that strategy=pserver is such a strategy may be said; a TCPServer is none
            said = path.read_text().lower().replace("=pserver", "").replace("tcpserver", "")
            lines = [line for line in said.splitlines() if "pserver" in line]
            assert not lines, f"{name}: {lines}"


def test_the_picture_shows_the_rooms_and_arrows_there_are() -> None:
    outdated = rooms().outdated
    assert not outdated(sources(), imports())
    assert outdated(sources(), imports() | {"dtf.core.text": {"dtf.cli.main"}})


def test_the_command_sees_what_breaks_the_rules(tmp_path: Path) -> None:
    """An upward import for a type alone, one inside a function, a circle, what is long: each is a line."""
    upward, circles = rooms().upward, rooms().circles
    assert upward({"dtf.core.text": {"dtf.cli.main"}, "dtf.cli.main": {"dtf.core.text"}})
    assert not upward({"dtf.cli.main": {"dtf.core.text"}})
    assert circles({"dtf.core.a": {"dtf.core.b"}, "dtf.core.b": {"dtf.core.c"}, "dtf.core.c": {"dtf.core.a"}})
    assert not circles({"dtf.core.a": {"dtf.core.b"}, "dtf.core.b": set()})
    hidden = tmp_path / "hidden.py"
    hidden.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dtf.cli import main\n"
        "def f():\n    import dtf.jobs.train\n"
    )
    files = {"dtf.core.hidden": hidden, "dtf.cli.main": hidden, "dtf.jobs.train": hidden}
    assert rooms().imports_of(files)["dtf.core.hidden"] == {
        "dtf.cli.main",
        "dtf.jobs.train",
    }
    for folder in ("dtf", "tests", "bench", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "dtf" / "long.py").write_text("def f():\n" + "    pass\n" * 60)
    (tmp_path / "tests" / "longer.py").write_text("x = 1\n" * 401)
    assert len(rooms().oversized({"dtf.long": tmp_path / "dtf" / "long.py"}, tmp_path)) == 2


def test_parts_of_a_kind_never_import_each_other() -> None:
    """A strategy, an observer, a job can be read, changed and removed alone."""
    parts = {name for name, path in sources().items() if rooms().room_of(name) in PARTS and registers(path)}
    assert len(parts) > 20
    for name in sorted(parts):
        package = name.rpartition(".")[0]
        others = {target for target in imports()[name] if target in parts and target.rpartition(".")[0] == package}
        assert not others, f"{name} imports its sibling {', '.join(sorted(others))}"


def test_dependencies_are_declared_and_explained() -> None:
    """What is imported is declared, and docs/dependencies.md has a row for each, with the same bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        re.split(r"[<>=\[]", text, maxsplit=1)[0]: text
        for text in [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    }
    modules = {
        "grpcio": "grpc",
        "hydra-core": "hydra",
        "kubeflow-trainer-api": "kubeflow_trainer_api",
        "kubernetes-validate": "kubernetes_validate",
        "pillow": "PIL",
        "prometheus-client": "prometheus_client",
        "pyyaml": "yaml",
        "zlib-ng": "zlib_ng",
    }
    runtime = {modules.get(name, name) for name, text in declared.items() if text in project["dependencies"]}
    extras = {
        "dtf.runs.charts": {"matplotlib"},
        "dtf.checkpoint.places": {"obstore"},
        "dtf.cluster.kubernetes_cluster": {"kubernetes", "urllib3"},
        "dtf.observers.mlflow_backend": {"mlflow"},
        "dtf.observers.wandb_backend": {"wandb"},
        "dtf.checkpoint.store_errors": {"obstore"},
        "dtf.cli.optuna_search": {"optuna"},
        "dtf.data.parquet_rows": {"pyarrow"},
        "dtf.data.table_rows": {"pyarrow"},
        "dtf.sparse.id_kernels": {"numba", "llvmlite"},
        "dtf.sparse.row_kernels": {"numba"},
        "dtf.sparse.life_kernels": {"numba"},
        "dtf.sparse.pool_kernels": {"numba"},
        "dtf.sparse.disk.cache_kernels": {"numba"},
        "dtf.sparse.disk.page_kernels": {"numba", "llvmlite"},
        "dtf.pserver.net.rpc": {"grpc"},
        "dtf.cluster.ray_client": {"ray"},
        "dtf.cluster.ray_driver": {"ray"},
        "dtf.cluster.ray_placement": {"ray"},
        "dtf.cluster.sagemaker_aws": {"boto3", "botocore"},
        "dtf.jobs.onnx_form": {"onnxruntime"},
        "dtf.recipes.resnet.model": {"timm"},
        "dtf.adapters.transformers_run": {"transformers"},
    }  # imported where the extra is known to be there
    extras |= {name: {"numba"} for name in sources() if name.startswith("dtf.recipes.ctr.")} | {
        "dtf.recipes.ctr.parquet": {"numba", "pyarrow"}
    }
    for name, path in sources().items():
        for node in walk(tree(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                roots = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or "dtf"]
                foreign = {root.split(".")[0] for root in roots} - set(sys.stdlib_module_names) - {"dtf"}
                assert foreign <= runtime | extras.get(name, set()), (
                    f"{name} imports {foreign - runtime}, which pyproject.toml does not declare"
                )
    rows = re.findall(r"^\| ([a-z].*?) \|", (ROOT / "docs" / "dependencies.md").read_text(), re.MULTILINE)
    bounds = {re.sub(r"\[.*\]", "", text).replace(",", ", ") for text in declared.values()}
    assert {row.replace(" ", "") for row in rows if row != "package"} == {text.replace(" ", "") for text in bounds}


def test_nothing_is_long_and_no_file_is_a_drawer() -> None:
    assert not rooms().oversized(sources())
    for path in [*sources().values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]:
        assert path.stem not in NO_NAMES, f"{path.relative_to(ROOT)}: name what it does"


def test_every_module_says_why_it_exists() -> None:
    for name, path in sources().items():
        assert not tree(path).body or ast.get_docstring(tree(path)), f"{name} has no docstring"


def test_public_signatures_name_their_arguments() -> None:
    for name, path in sources().items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                assert node.args.kwarg is None, (
                    f"{name}:{node.lineno} {node.name}(**{node.args.kwarg.arg if node.args.kwarg else ''})"
                )


def registers(path: Path) -> bool:
    decorators = (d for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef) for d in node.decorator_list)
    return any(isinstance(d, ast.Call) and isinstance(d.func, ast.Name) and d.func.id == "register" for d in decorators)


def test_registered_classes_import_without_torch() -> None:
    """The command line reads their fields: torch, numpy and what they cost must wait for the ranks."""
    names = [name for name, path in sources().items() if registers(path)]
    assert {"dtf.strategies.ddp", "dtf.optim.optimizers", "dtf.api.precision"} <= set(names)
    front = ["dtf.config.settings", "dtf.config.compose", "dtf.runs.run_folder", "dtf.config.describe", "dtf.cli.main"]
    code = (
        "import importlib, sys\n"
        f"for name in {names + front!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'torchvision', 'numpy', 'numba', 'tensorboard', 'safetensors', 'grpc'} & "
        "set(sys.modules)\n"
        "    if heavy: sys.exit(f'{name} imports {heavy}')\n"
        "import dtf\n"  # a recipe's file imports these at its top
        "opened = [getattr(dtf, name) for name in dtf._CALLED_LATER]\n"
        "assert 'torch' not in sys.modules and {'map_style', 'cross_entropy'} <= {each.__name__ for each in opened}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_function_that_needs_torch_imports_it_when_it_is_called() -> None:
    late = dtf._imported_when_called("dtf.data.map_style", "map_style")
    assert late.__name__ == "map_style" and late([(1.0, 2)]).fetch(np.array([0]), 0)[1].tolist() == [2]
    assert dtf.map_style is sys.modules["dtf.data.map_style"].map_style, "where torch is imported already"


def test_every_registered_class_is_loaded() -> None:
    """One in a module that nobody names would be no option, without a word."""
    named = {f"dtf.{package}.{module}" for package, modules in _PARTS.items() for module in modules.split()}
    found = {name for name, path in sources().items() if registers(path)}
    assert {name for name in found if not name.startswith("dtf.recipes.")} == named
    assert all(name.endswith("recipe") for name in found - named)


def test_the_fork_server_imports_neither_grpc_nor_what_few_runs_need() -> None:
    """grpc does not survive a fork: calls in the child would hang. The others take a fifth of the time until the first
    step.
    """
    (found,) = ranks(1, "tests.laws.test_architecture:loaded")
    assert set(found) - {"torchvision" for _ in MORE} == {
        "dtf.cli.preload"
    }  # other tests let it import the zoo's models


def loaded(rank: int, size: int) -> list[str]:
    """Which of these a rank has from the fork server."""
    names = ("dtf.cli.preload", "grpc", "hydra", "omegaconf", "pyarrow", "torchvision", "dtf.recipes.ctr.log")
    return [name for name in names if name in sys.modules]


# ---------------------------------------------------------------- no code from data


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def forbidden(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and reason of each call or import that could run code found in data, a config or a peer's message."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            origins = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            for origin in origins:
                if origin.split(".")[0] in PICKLES:
                    yield node.lineno, f"import of {origin}"
            for full in [f"{origins[0]}.{name}" for name in names] if isinstance(node, ast.ImportFrom) else []:
                if full in {"torch.save", "torch.load", "os.system", "os.popen", "hydra.utils"} or full.endswith(
                    OBJECT_COLLECTIVES
                ):
                    yield node.lineno, f"import of {full}"
        if not isinstance(node, ast.Call):
            continue
        name, keywords = dotted(node.func), {keyword.arg: keyword.value for keyword in node.keywords}

        def given(key: str, value: bool, keywords: dict[str | None, ast.expr] = keywords) -> bool:
            found = keywords.get(key)
            return isinstance(found, ast.Constant) and found.value is value

        if name in {
            "eval",
            "exec",
            "__import__",
            "os.system",
            "os.popen",
            "yaml.unsafe_load",
            "yaml.full_load",
            "yaml.load",
            "torch.save",
        }:
            yield node.lineno, f"call of {name}"
        if name in {"torch.load", "torch.hub.load_state_dict_from_url"} and not given("weights_only", True):
            yield node.lineno, f"{name} without weights_only=True"
        if name.endswith(OBJECT_COLLECTIVES):
            yield node.lineno, f"{name} pickles"
        if name.endswith((".instantiate", ".get_class", ".get_method")):
            yield node.lineno, f"{name} imports by name"
        if "shell" in keywords and not given("shell", False):
            yield node.lineno, f"{name} with a shell"
        if "allow_pickle" in keywords and not given("allow_pickle", False):
            yield node.lineno, f"{name} with allow_pickle"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as safe",
        "torch.save(model, path)",
        "from torch import save",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "torch.distributed.all_gather_object(out, value)",
        "dist.broadcast_object_list(values)",
        "from torch.distributed import gather_object",
        "eval(text)",
        "exec(text)",
        "os.system(command)",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=flag)",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "hydra.utils.instantiate(node)",
    ],
)
def test_the_guard_sees(code: str) -> None:
    assert list(forbidden(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "torch.load(path, weights_only=True)",
        "subprocess.run(command, shell=False)",
        "safetensors.torch.save_file(a, b)",
    ],
)
def test_the_guard_lets_pass(code: str) -> None:
    assert not list(forbidden(ast.parse(code)))


def test_nothing_runs_code_from_data() -> None:
    found = [f"{name}:{line}: {reason}" for name, path in sources().items() for line, reason in forbidden(tree(path))]
    assert not found, "\n".join(found)


def keys(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield str(key)
            yield from keys(value)
    elif isinstance(node, list):
        for value in node:
            yield from keys(value)


def test_no_config_names_a_class() -> None:
    files = [*(ROOT / "conf").rglob("*.yaml"), *(ROOT / "recipes").rglob("*.yaml")]
    assert files
    for path in files:
        assert "_target_" not in set(keys(yaml.safe_load(path.read_text()))), path
