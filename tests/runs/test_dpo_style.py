"""The experiments dpo_style and kto_style, four steps long, and the run that they start from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mgpu_pipe.checks.notices import notices
from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.text.heldout_split import held_out
from mgpu_pipe.data.text.numbers import answers
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.errors import ConfigErrors
from tests.support.command import mgpu, run_folder
from tests.support.sampling import one_in


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "shares"),
    one_in(2, [("dpo", ("val/preference_accuracy", "val/style_rate")), ("kto", ("val/accuracy",))]),
)
def test_four_steps_start_from_the_run_of_another_experiment(
    cache: Path, tmp_path: Path, objective: str, shares: tuple[str, ...]
) -> None:
    own = tmp_path / "conf" / "experiment"
    own.mkdir(parents=True)
    shipped = Path(__file__).parents[2] / "conf" / "experiment" / "spoken_base.yaml"
    base = shipped.read_text(encoding="utf-8")
    for long, small in (
        ("max_steps: 600", "max_steps: 4"),
        ("count: 3000", "count: 200"),
        ("steps: 20\n", "steps: 1\n"),
    ):
        assert long in base
        base = base.replace(long, small)
    (own / "short_base.yaml").write_text(base, encoding="utf-8")
    short = (
        "trainer.max_steps=4",
        "trainer.val_every_n_steps=2",
        "scheduler.warmup_steps=1",
        "logger=none",
        "data.numbers.count=200",
    )
    words = (f"experiment={objective}_style", "run.starts_from=short_base", "trainer.devices=2", *short)
    out = mgpu(cache, tmp_path, *words)
    folder = run_folder(out)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    metrics = summary["metrics"]
    assert summary["status"] == "finished" and summary["objective"] == objective
    assert all(0 <= metrics[share] <= 1 for share in shares)
    assert [sample["prompt"] for sample in summary["samples"]] == ["9 0 7", "2 4 6 8"]
    (first,) = (tmp_path / "outputs" / "spoken_base").iterdir()
    assert str(first) in (folder / "config.yaml").read_text(encoding="utf-8")
    mgpu(cache, tmp_path, *words, "run.name=again")
    assert len(list((tmp_path / "outputs" / "spoken_base").iterdir())) == 1, "the finished run is taken"


@pytest.mark.slow
def test_both_styles_are_held_out_alike(cache: Path) -> None:
    held = []
    for words in (
        ["data=spoken_chat"],
        ["data=spoken_preferences", "objective=dpo"],
        ["data=spoken_unpaired", "objective=kto"],
    ):
        sizes = ["data.numbers.count=300", "data.chat_template=chatml", f"data.cache_dir={cache}"]
        config = compose([*words, *sizes])[0]
        hashes = TokenStore.open(prepare(config).folder).hashes  # type: ignore[attr-defined]
        held.append(set(hashes[held_out(hashes, config.data.validation_fraction)].tolist()))
    assert answers(907) == ("It is nine zero seven.", "nine zero seven")
    assert held[0] == held[1] == held[2] and 0 < len(held[0]) < 60


def test_check_says_what_is_trained_first() -> None:
    told = [notice.text for notice in notices(compose(["experiment=dpo_style"])[0]) if notice.key == "run.starts_from"]
    assert told == ["experiment=spoken_base is trained first, unless outputs holds a finished run of it"]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("checkpoint.init_from=elsewhere", "leave it or checkpoint.init_from out"),
        ("launch=slurm", "run that experiment first, and give its folder by checkpoint.init_from"),
    ],
)
def test_a_start_that_cannot_be_is_refused(override: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors) as refused:
        preflight(compose(["experiment=dpo_style", override])[0])
    assert told in str(refused.value)
