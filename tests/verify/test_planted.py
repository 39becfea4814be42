"""The command finds a planted error under every data-parallel preset: an installed objective, wrong on one rank.

Oracle: the error itself. The plain computation of ``verify`` knows no objective class, so it stays right.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.command import REPOSITORY
from tests.support.program import run_program

pytestmark = pytest.mark.slow

TARGET = "model.layers.1.mlp.down_proj"
PACKAGE = {
    "planted.py": f'''
import os
from mgpu_pipe.objectives.causal_lm import CausalLMObjective

class WrongOnRank1(CausalLMObjective):
    """The gradient of one weight is 0.1 % too large on rank 1, before it is reduced."""
    planted = False

    def micro_batch_loss(self, batch):
        if os.environ["RANK"] == "1" and not self.planted:
            self.planted = True
            module = self.model.get_submodule("{TARGET}")

            def on_first_forward(module, _):
                handle.remove()
                module.weight.register_hook(lambda gradient: gradient * 1.001)  # of the gathered weight

            handle = module.register_forward_pre_hook(on_first_forward)
        return super().micro_batch_loss(batch)
''',
    "planted-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: planted\nVersion: 1\n",
    "planted-1.dist-info/entry_points.txt": "[mgpu_pipe.objectives]\nwrong_on_rank_1 = planted:WrongOnRank1\n",
}
MORE = {"zero3_nvme": ["strategy.offload_path=nvme"]}
PRESETS = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "zero3_cpu", "zero3_nvme")
EACH_TIME = ("fsdp",)
"""``make test`` tries this; test_mesh_strategies and test_deepspeed plant the error without the command."""


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[] if name in EACH_TIME else pytest.mark.exhaustive) for name in PRESETS]
)
def test_the_exit_code_and_the_parameter(preset: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if preset == "zero3_nvme":
        request.getfixturevalue("nvme_extension")
    (tmp_path / "nvme").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = run_program(
        [
            "verify",
            f"strategy={preset}",
            "model=llama_tiny",
            "trainer.devices=4",
            "objective.name=wrong_on_rank_1",
            *MORE.get(preset, ()),
        ],
        tmp_path,
        {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}", "OMP_NUM_THREADS": "1"},
        300,
    )
    assert done.returncode == 1, done.stderr
    assert f"error: gradient, {TARGET}.weight, step " in done.stderr
    assert "error: loss" not in done.stderr
