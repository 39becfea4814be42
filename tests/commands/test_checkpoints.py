"""``mgpu-pipe checkpoints`` on real folders; the oracles are what was written, and which files are left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml

from mgpu_pipe.checkpoint.compare import compare_tensors
from mgpu_pipe.checkpoint.save import save
from mgpu_pipe.checkpoint.selection import mark_ruined
from mgpu_pipe.cli.main import main
from mgpu_pipe.report.numbers import MISSING
from mgpu_pipe.runs.lock import RunLock
from tests.checkpoint.support import CUTS, cut_shards, flip_bit, model_tensors, optimizer_tensors

STEPS = (10, 20, 30, 40)
LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: 4.0}


def save_step(
    run: Path, step: int, cut: str = "whole", seed: int = 0, lr: float = 0.1, changed: Mapping[str, torch.Tensor] = {}
) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    settings = {
        "keep_last": 2,
        "keep_every": None,
        "keep_best": 1,
        "best_metric": "val/loss",
        "on_corruption": "fallback",
    }
    (run / "config.yaml").write_text(
        yaml.safe_dump({"strategy": {"name": "zero3"}, "optimizer": {"lr": lr}, "checkpoint": settings})
    )
    state = {"topology": {"dp_shard": 4, "tp": 1}, "precision": "bf16", "metrics": {"val/loss": LOSSES.get(step, 9.0)}}
    weights, moments = {**model_tensors(seed), **changed}, optimizer_tensors(seed)
    cut_model, cut_optimizer = (cut_shards(tensors, CUTS[cut]) for tensors in (weights, moments))
    return save(run / "checkpoints", step, cut_model, cut_optimizer, state, run / "config.yaml")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in STEPS:
        save_step(tmp_path / "run", step, seed=step)
    return tmp_path / "run"


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["checkpoints", *words]) == code
    done = capsys.readouterr()
    return done.out + done.err


def damage(run: Path, step: int, position: int = 4_250_000) -> Path:
    file = run / "checkpoints" / f"step-{step:08d}" / "model-00000.safetensors"
    flip_bit(file, position)
    return file


def rows(text: str) -> dict[int, str]:
    found = {}
    for line in text.splitlines():
        words = line.replace("*", " ").split()
        if words and words[0].isdigit():
            found[int(words[0])] = line
    return found


def test_the_list_says_when_by_what_and_which_one_resume_takes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step-00000050.partial").mkdir()
    listed = rows(text := said(capsys, str(run)))
    assert list(listed) == list(STEPS)
    for step, line in listed.items():
        assert "zero3" in line and "bf16" in line and "whole" in line and "MiB" in line and "20" in line
        assert ("*" in line) == (step == 40)
    assert "dp_shard=4" in text and "tp=1" not in text
    assert [listed[step].split()[-1] for step in STEPS] == [MISSING, "best", "last", "last"]
    assert "step-00000050.partial: unfinished" in text and "resume=auto" in text
    assert list(rows(said(capsys, str(run / "checkpoints" / "step-00000020")))) == [20]


def test_a_long_state_leaves_the_strategy_readable(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark_ruined(run / "checkpoints", [30, 40])
    text = said(capsys, str(run))
    assert "zero3" in rows(text)[40] and all(len(line) <= 80 for line in text.splitlines() if "zero3" in line)


def test_a_truncated_newest_step_is_shown_and_the_one_before_it_is_taken(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = run / "checkpoints" / "step-00000040" / "model-00000.safetensors"
    os.truncate(weights, 1000)
    text = said(capsys, str(run), code=1)
    assert "damaged" in rows(text)[40] and "*" in rows(text)[30]
    assert f"damaged: {weights}: has 1000 bytes" in text


def test_check_names_every_bad_chunk_of_every_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "whole" in said(capsys, str(run), "check", "--full")
    file = damage(run, 20)
    damage(run, 20, 100_000)
    (run / "checkpoints" / "step-00000030" / "state.json").unlink()
    assert str(file) not in said(capsys, "check", str(run), code=1), "sizes do not show a flipped bit"
    text = said(capsys, "check", str(run), "--full", code=1)
    assert f"{file}: chunk 0 of 2" in text and f"{file}: chunk 1 of 2" in text
    assert "step-00000030/state.json: the file is missing" in text
    assert "step-00000040: whole" in text


def test_a_manifest_of_another_step_is_damage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(run / "checkpoints/step-00000010/manifest.json", run / "checkpoints/step-00000020/manifest.json")
    assert "its manifest is of step 10" in said(capsys, "check", str(run), code=1)


def test_equal_content_of_other_cuts_compares_as_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (save_step(tmp_path / cut, 5, cut) for cut in ("whole", "rows"))
    text = said(capsys, "compare", str(a), str(b))
    assert "16 tensors are equal, 0 differ" in text


def test_compare_finds_the_changed_element_and_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = model_tensors(0)["embed.weight"].clone()
    changed[2000, 500] += 0.5
    a, b = save_step(tmp_path / "a", 5), save_step(tmp_path / "b", 5, lr=0.2, changed={"embed.weight": changed})
    text = said(capsys, "compare", str(tmp_path / "a"), str(b), code=1)
    assert "embed.weight" in text and "5.0e-01" in text and "norm.weight" not in text
    assert "optimizer.lr" in text and "0.2" in text and "strategy.name" not in text
    assert "15 tensors are equal, 1 differ" in text
    said(capsys, "compare", str(a), str(b), "--tolerance", "1e-2")
    (found,) = compare_tensors(a, b).differing
    original = model_tensors(0)["embed.weight"].double()
    expected = (changed - original).norm() / original.norm()
    assert found.relative == pytest.approx(float(expected), rel=1e-6)


def test_compare_lists_what_is_on_one_side_alone_and_values_that_are_no_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mgpu_pipe.checkpoint.save.all_finite", lambda data, dtype: True)
    bad = torch.full((33,), float("nan"))
    a = save_step(tmp_path / "a", 5, changed={"norm.weight": bad, "extra": torch.ones(2), "shape": torch.ones(2)})
    b = save_step(tmp_path / "b", 5, changed={"shape": torch.ones(3)})
    found = compare_tensors(a, b, ("model",))
    assert [(one.name, one.relative) for one in found.differing] == [("norm.weight", float("inf"))]
    assert found.unlike == ["extra is only in the first", "shape has the shapes [2] and [3]"]
    assert compare_tensors(a, save_step(tmp_path / "c", 6, changed={"norm.weight": bad})).differing == []


def test_prune_shows_first_and_deletes_only_when_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "prune", str(run), "--keep-last", "1", "--keep-every", "30")
    assert "would delete: 10" in text and "--yes" in text
    assert len(list((run / "checkpoints").iterdir())) == 4
    assert "deleted: 10" in said(capsys, "prune", str(run), "--keep-last", "1", "--keep-every", "30", "--yes")
    assert sorted(path.name[-2:] for path in (run / "checkpoints").iterdir()) == ["20", "30", "40"]
    said(capsys, "prune", str(run), "--keep-last", "1", "--keep-best", "0", "--yes")
    # A finite step followed 30; whether one followed the newest is not known.
    assert sorted(path.name[-2:] for path in (run / "checkpoints").iterdir()) == ["30", "40"]


def test_prune_keeps_the_newest_that_is_whole_and_what_is_damaged(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run, 40)
    text = said(capsys, "prune", str(run), "--keep-last", "1", "--keep-best", "0", "--yes", code=1)
    assert "deleted: 10" in text and "chunk 1 of 2" in text
    assert sorted(path.name[-2:] for path in (run / "checkpoints").iterdir()) == ["20", "30", "40"]
    damage(run, 20)
    damage(run, 30)
    assert "none is deleted" in said(capsys, "prune", str(run), "--keep-last", "1", code=2)


def test_a_living_run_is_not_pruned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLock(run / ".lock"):
        text = said(capsys, "prune", str(run), "--keep-last", "1", "--yes", code=2)
    assert str(run) in text and len(list((run / "checkpoints").iterdir())) == 4


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere"], "nowhere: no such folder"),
        ([], "no run with a checkpoint"),
        (["prune"], "required: --keep-last"),
        (["prune", "--keep-last", "0"], "0: use a whole number of at least 1"),
        (["compare", "a"], "required: second"),
        (["check", "--ful"], "unrecognized arguments: --ful"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = said(capsys, *words, code=2)
    assert expected in text and text.count("\n") == 1


def test_listing_checking_and_pruning_never_import_torch(run: Path) -> None:
    program = (
        "import sys; from mgpu_pipe.cli.main import main; run = sys.argv[1]\n"
        "for words in ([run], ['check', run, '--full'], ['prune', run, '--keep-last', '1', '--yes']):\n"
        "    assert main(['checkpoints', *words]) == 0\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(run)], check=True, capture_output=True)
