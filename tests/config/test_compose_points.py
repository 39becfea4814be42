"""A sweep's points, composed by merging values after the groups. Oracle: Hydra composes each point whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mgpu_pipe.config.convert import to_plain
from mgpu_pipe.config.freeze import HEADER, freeze
from mgpu_pipe.config.hydra.compose import compose_in, hydra_session
from mgpu_pipe.config.hydra.compose_points import PointComposer
from mgpu_pipe.config.hydra.interpolation import escape
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.system.conf_folders import CONFIG_NAME

FIXED = ["model=llama_tiny", "callbacks.own._target_=a.B", "callbacks.own.size=3", "trainer.max_steps=9"]
QUICK = [
    ["optimizer.lr=0.001", "seed=3"],
    ["optimizer.lr=1e-3", "trainer.max_steps=12"],
    ["strategy=fsdp", "trainer.num_nodes=2"],
    ["strategy=hsdp", "seed=1"],
    ["experiment=quickstart", "optimizer.lr=0.5"],
    ["callbacks.own.size=4"],
    ["run.name='a b, \"c\"'", "run.dir=null", "checkpoint.save_last=false"],
    ["optimizer.lr=1", "optimizer.lr=wrong"],
    ["model=llama_small", "model=llama_tiny", "seed=4"],
]
WHOLE = [
    ["strategy=hsdp", "trainer.num_nodes=2"],
    ["experiment=quickstart", "trainer.accelerator=cpu"],
    ["strategy=fsdp"],
    ["run.tags=[a,b]"],
    ["optimizer.lr=${oc.env:NOWHERE,3}"],
    ["optimizer.lrr=3"],
    ["optimizer=nothing", "seed=3"],
    ["callbacks.other.size=4"],
    ["logger=wandb", "run.name=x"],
    ["+seed=3"],
    ["seed=[1"],
    ["hydra.job.name=x", "seed=3"],
]


@pytest.mark.slow
@pytest.mark.parametrize("quick", [True, False])
def test_a_point_is_what_hydra_composes(quick: bool) -> None:
    with hydra_session() as hydra:
        composer = PointComposer(hydra, FIXED, CONFIG_NAME)
        for point in QUICK if quick else WHOLE:
            whole = compose_in(hydra, [*FIXED, *point])
            assert (composer._quickly(point) is not None) == quick, point
            made = composer.compose(point)
            assert made.config == whole.config and repr(made.config) == repr(whole.config), point
            assert made.overrides == whole.overrides, point
            assert list(map(str, made.errors)) == list(map(str, whole.errors)), point
            assert (made.local_options, made.multirun) == (whole.local_options, whole.multirun)


def test_points_do_not_share_values() -> None:
    with hydra_session() as hydra:
        composer = PointComposer(hydra, FIXED, CONFIG_NAME)
        first, second = composer.compose(["seed=1"]).config, composer.compose(["seed=2"]).config
    first.callbacks["own"]["size"] = 7
    assert second.callbacks["own"]["size"] == 3 and (first.seed, second.seed) == (1, 2)


def test_a_configuration_written_by_sections_is_the_one_written_whole(tmp_path: Path) -> None:
    with hydra_session() as hydra:
        made = PointComposer(hydra, FIXED, CONFIG_NAME).compose(["run.name='é ${x}'", "seed=2"]).config
    for config in (RunConfig(), made):
        freeze(config, tmp_path / "config.yaml")
        whole = yaml.safe_dump(escape(to_plain(config, leaf=lambda value: value)), sort_keys=False, allow_unicode=True)
        assert (tmp_path / "config.yaml").read_text(encoding="utf-8") == HEADER + whole
