"""Zero-shot classification by prompts. Oracle: CLIP's definition, prompt by prompt in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.inference.open import load_run
from mgpu_pipe.objectives.class_sums import class_vectors
from tests.support import small_runs
from tests.support.pictures import folder_of_classes


def test_a_class_is_the_normalised_mean_of_its_normalised_templates() -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(50, 6, generator=generator) * torch.rand(50, 1, generator=generator)
    tokens = torch.randint(0, 50, (300, 3, 1), generator=generator)
    found = class_vectors(lambda rows: table[rows[:, 0]], tokens)
    for number in (0, 100, 299):
        vectors = table[tokens[number, :, 0]].double().numpy()
        mean = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).mean(0)
        assert np.allclose(found[number], mean / np.linalg.norm(mean), atol=1e-6)


def test_json_is_not_for_the_harness(capsys: pytest.CaptureFixture[str]) -> None:
    from mgpu_pipe.cli.main import main

    assert main(["eval", "gone", "--json", "--harness", "sums"]) == 2
    assert "--json: --harness prints no JSON; use --harness-output FILE" in capsys.readouterr().err


def captioned(folder: Path, *overrides: str) -> RunConfig:
    root = folder / "pictures"
    if not root.exists():
        folder_of_classes(root, each=10)
    given = ("data=captioned_folder", f"data.paths=[{root}]", f"data.cache_dir={folder / 'cache'}", "data.seq_len=12")
    sizes = ("model.config.vision_config.image_size=16", "data.global_batch_size=8", "data.validation_fraction=0.4")
    more = ("logger=none", "trainer.progress=off", "trainer.max_steps=2", 'data.captions=["a {}","one {} here"]')
    return compose(["objective=contrastive", "model=clip_tiny", *given, *sizes, *more, *overrides])[0]


@pytest.mark.slow
def test_eval_classifies_held_out_pictures_by_all_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mgpu_pipe.cli.main import main

    small_runs.run(captioned, tmp_path / "run", 1, "strategy=single")
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--device", "cpu", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    shot = found["zero_shot"]
    # By hand: transformers' features of every prompt and picture, one at a time.
    run, config = load_run(tmp_path / "run"), captioned(tmp_path)
    model: Any = run.model
    prepared: Any = prepare(config)
    held = prepared.open(config, "validation")
    table = np.load(prepared.held_out_table / "captions.npy").astype(np.int64)
    with torch.no_grad():
        rows = [torch.from_numpy(row)[None] for row in table]
        texts = torch.cat([model(input_ids=row, pixel_values=torch.zeros(1, 1, 16, 16)).text_embeds for row in rows])
        batch = held.batch(np.arange(len(held)), -1 - np.arange(len(held)))
        images = torch.cat(
            [model(input_ids=rows[0], pixel_values=one[None]).image_embeds for one in batch["pixel_values"]]
        )
    unit = (texts / texts.norm(dim=1, keepdim=True)).reshape(3, 2, -1).mean(1).double()
    logits = images.double() @ (unit / unit.norm(dim=1, keepdim=True)).T
    right = logits.argmax(1) == batch["labels"]
    assert shot["templates"] == 2 and shot["accuracy"] == pytest.approx(float(right.double().mean()))
    by_class = {each["name"]: (each["samples"], each["right"]) for each in shot["classes"]}
    for number, name in enumerate(("dark", "light", "stripes")):
        mine = batch["labels"] == number
        assert by_class[name] == (int(mine.sum()), int((mine & right).sum()))
    assert main(["eval", str(tmp_path / "run"), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert f"{100 * shot['accuracy']:.2f}% of 3 classes, by the mean of 2 templates" in printed
    assert "most often taken for" in printed and "expected error" in printed
