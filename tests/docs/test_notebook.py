"""Real notebooks: cells that Jupyter's kernel runs, interrupts and ends. Slow, and skipped without Jupyter's packages:
pip install ipykernel nbclient.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_python_page import CELLS

pytestmark = pytest.mark.slow
pytest.importorskip("ipykernel")
nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_a_notebook_of_the_cells_of_the_page_runs() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3").execute()
    train = next(cell for cell in notebook.cells if "result = dtf.train" in cell.source)
    text = "".join(output.get("text", "") for output in train.outputs)
    lines = [line.rpartition("\r")[2] for line in text.split("\n")]
    assert any(line.startswith("recipe ") for line in lines), text
    assert sum(line.startswith("eval step=") for line in lines) == 3, text
    assert sum("rows/s=" in line for line in lines) <= 2, "what is measured in training takes one line"


@pytest.fixture
def kernel() -> Iterator[Any]:
    manager, client = pytest.importorskip("jupyter_client.manager").start_new_kernel(kernel_name="python3")
    try:
        yield manager, client
    finally:
        client.stop_channels()
        if manager.is_alive():
            manager.shutdown_kernel(now=True)


def run(client: Any, code: str, hear: Callable[[str], None] = lambda text: None) -> tuple[str, str]:
    """What a cell printed, and the name of the exception that ended it."""
    texts: list[str] = []

    def take(message: Any) -> None:
        if message["msg_type"] == "stream":
            texts.append(message["content"]["text"])
            hear(texts[-1])

    reply = client.execute_interactive(code, output_hook=take, timeout=TIMEOUT_S)
    return "".join(texts), reply["content"].get("ename", "")


def test_an_interrupted_cell_leaves_a_run_that_goes_on_and_a_kernel_that_works(kernel: Any) -> None:
    manager, client = kernel
    assert run(client, CELLS[0])[1] == ""
    options = "'recipe=product', 'launcher=inline', {'train.steps': 100_000, 'launcher.threads': 1}"
    interrupted: list[str] = []

    def interrupt(text: str) -> None:
        if "rows/s=" in text and not interrupted:
            interrupted.append(text)
            manager.interrupt_kernel()

    handlers = "import signal; print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))"
    before = run(client, handlers)
    assert run(client, f"config = dtf.compose([{options}])\ndtf.train(config)", interrupt)[1] == "Preempted"
    assert run(client, handlers) == before and interrupted
    text, ended = run(client, "import sys; folder = sys.last_value.folder; print(folder)")
    saved = max(Path(text.strip(), "checkpoints").glob("step_*"))
    step = int(saved.name.rpartition("_")[2])
    keys = f"{{'run.dir': folder, 'train.until': {step + 3}}}"
    run(client, f"seen = []\nresult = dtf.train(config.with_({keys}), callbacks=[seen.append])")
    text, ended = run(client, "print(seen[0].step, result.step)")
    assert text.split() == [str(step), str(step + 3)], ended


def test_no_process_outlives_a_kernel(kernel: Any) -> None:
    manager, client = kernel
    quick = "{'train.steps': 2, 'train.eval_every': 0, 'launcher.threads': 1, 'launcher.devices': 'cpu'}"
    code = f"""
import dtf
from tests.support import toy
dtf.train(dtf.compose(["recipe=toy", "launcher.processes=2", "observer=[]", {quick}]))
from dtf.launch import forkserver_cache
import sys; print("server", forkserver_cache._server.pid, "torch" in sys.modules)
"""
    text, ended = run(client, code)
    found = re.search(r"server (\d+) False", text)
    assert found and not ended, (text, ended)
    server = os.pidfd_open(int(found[1]))
    try:
        manager.shutdown_kernel(now=True)
        assert select.select([server], [], [], 60)[0], "the fork server lives on"
    finally:
        os.close(server)
