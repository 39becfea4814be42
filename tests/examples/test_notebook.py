"""The example notebook, run whole: in a kernel of its own, as Jupyter runs it, and as one program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import REPOSITORY, environment

pytestmark = pytest.mark.slow

NOTEBOOK = REPOSITORY / "examples" / "notebook" / "first_runs.ipynb"
CONTENT: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
CELLS = [cell for cell in CONTENT["cells"] if cell["cell_type"] == "code"]


def check_said(out: str, shown: str) -> None:
    """What the cells print, and the progress that comes below them."""
    assert "trainer.devcies | 2 | did you mean trainer.devices?" in out
    assert "step 20/20 (100%)" in shown
    first, last = re.findall(r"20 steps, loss ([\d.]+) to ([\d.]+); checkpoint of step 20", out)[0]
    assert float(last) < float(first)
    assert "LlamaForCausalLM" in out
    assert float(re.findall(r"largest difference of the loss: (\S+)", out)[0]) < 1e-5


def test_it_keeps_no_output() -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CELLS)


@pytest.mark.exhaustive
def test_its_cells_run_as_one_program(tmp_path: Path, cache: Path) -> None:
    program = "\n".join("".join(cell["source"]) for cell in CELLS)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(cache),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check_said(done.stdout, done.stderr)
    assert (tmp_path / "comparison.html").is_file()


@pytest.mark.exhaustive
def test_it_runs_in_a_kernel(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "the notebook is run by nbclient; pip install nbclient ipykernel"
    nbclient = pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    import nbformat

    own = {"JUPYTER_PATH": str(tmp_path / "jupyter"), "IPYTHONDIR": str(tmp_path)}
    for name, value in {**environment(cache), **own}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it a kernel leaves descriptors 1 and 2 alone
    kernel = tmp_path / "jupyter" / "kernels" / "here" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": argv, "display_name": "here", "language": "python"}))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="here", resources=resources).execute()
    streams: dict[str, str] = {"stdout": "", "stderr": ""}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                streams[output.name] += output.text
            else:
                streams["stdout"] += output.data.get("text/plain", "")
    check_said(streams["stdout"], streams["stderr"])
    assert "finished at step 20" in streams["stdout"] and os.path.exists(tmp_path / "comparison.html")
