"""A LoRA run as a user meets it: trained under one strategy, continued under another, evaluated and exported.

Oracles: the run of one process; the peft package, which loads the exported adapter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.selection import list_steps
from mgpu_pipe.models.adapters.lora import ADAPTER_NAMES
from mgpu_pipe.models.adapters.qlora import Block, dequantise, quantise
from tests.runs.support import overrides, same
from tests.support.command import column, mgpu, run_folder

pytestmark = pytest.mark.slow


def tuning(corpus: Path, base: Path, *more: str) -> list[str]:
    adapters = ("model=hf", f"model.path={base}", "peft.r=4", "optimizer.lr=3e-3", "trainer.max_steps=6")
    horizon = ("scheduler.total_steps=6", "trainer.val_every_n_steps=3", "checkpoint.every_n_steps=3")
    return overrides(corpus, *adapters, *horizon, *more)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_run_moves_between_strategies_and_its_adapter_loads_in_peft(
    cache: Path, corpus: Path, base: Path, tmp_path: Path, kind: str
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    whole = run_folder(mgpu(cache, tmp_path, *tuning(corpus, base, f"peft={kind}")))
    moved = tuning(corpus, base, f"peft={kind}", f"run.dir={tmp_path / 'moved'}")
    mgpu(cache, tmp_path, *moved, "strategy=zero3", "trainer.devices=2", "trainer.max_steps=3")
    mgpu(cache, tmp_path, *moved, "strategy=tp", "trainer.devices=2", "checkpoint.resume=auto")
    same(tmp_path / "moved", whole)

    reader = CheckpointReader(list_steps(tmp_path / "moved" / "checkpoints")[0].path)
    assert all(name.rpartition(".")[2] in ADAPTER_NAMES for name in reader.names("model"))

    for option in ("--adapter", "--merge"):
        mgpu(cache, tmp_path, "export", str(tmp_path / "moved"), "--out", str(tmp_path / option), option)
    load: Any = AutoModelForCausalLM.from_pretrained
    adapted = PeftModel.from_pretrained(load(base), str(tmp_path / "--adapter")).eval()
    merged, plain = load(tmp_path / "--merge").eval(), load(base).eval()
    ids = torch.randint(0, plain.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    logits = [model(input_ids=ids).logits for model in (adapted, merged, plain)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)
    assert float((logits[0] - logits[2]).abs().max()) > 1e-3, "nothing was learned"
    reached = [float(mgpu(cache, tmp_path, "eval", str(run)).split()[1]) for run in (whole, tmp_path / "moved")]
    assert abs(reached[0] / reached[1] - 1) < 1e-5


def test_a_run_beside_four_bit_weights_moves_and_is_evaluated_with_their_values(
    cache: Path, corpus: Path, base: Path, tmp_path: Path
) -> None:
    whole = run_folder(mgpu(cache, tmp_path, *tuning(corpus, base, "peft=qlora")))
    moved = tuning(corpus, base, "peft=qlora", f"run.dir={tmp_path / 'moved'}")
    mgpu(cache, tmp_path, *moved, "strategy=fsdp", "trainer.devices=2", "trainer.max_steps=3")
    mgpu(cache, tmp_path, *moved, "strategy=pp", "trainer.devices=2", "checkpoint.resume=auto")
    same(tmp_path / "moved", whole)
    reader = CheckpointReader(list_steps(tmp_path / "moved" / "checkpoints")[0].path)
    assert all(name.rpartition(".")[2] in ADAPTER_NAMES for name in reader.names("model"))
    mgpu(cache, tmp_path, "export", str(tmp_path / "moved"), "--out", str(tmp_path / "merged"))
    reached = float(mgpu(cache, tmp_path, "eval", str(tmp_path / "moved")).split()[1])
    assert abs(reached / column(whole, "val/loss")[6] - 1) < 1e-4, "not with the values that were trained beside"
    state = load_file(tmp_path / "merged" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    plain = load_file(base / "model.safetensors")[name]
    values = dequantise(*quantise(plain), Block(plain.shape[1]))
    changed = torch.linalg.matrix_rank(state[name] - values, rtol=1e-4)
    assert int(changed) <= 4 < int(torch.linalg.matrix_rank(state[name] - plain, rtol=1e-4)), "a product of rank 4"


def test_what_does_not_go_together_is_refused(cache: Path, alone: Path, tmp_path: Path) -> None:
    refused = mgpu(cache, tmp_path, "export", str(alone), "--out", str(tmp_path / "out"), "--merge", code=2)
    assert "--merge: " in refused and "has no adapters; leave the option out" in refused
    said = mgpu(cache, tmp_path, "check", "peft=lora", "peft.dropout=0.1", "strategy=tp", "trainer.devices=2", code=2)
    assert "peft.dropout=0.1: tensor-parallel ranks would have to drop the same inputs; use peft.dropout=0" in said
    said = mgpu(cache, tmp_path, "check", "peft=lora", "peft.targets=[q_prj]", code=2)
    assert "peft.targets=q_prj: matches nothing in the model; did you mean q_proj?" in said
