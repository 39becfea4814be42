"""Data that was moved is the same data: a run resumes on another machine, with other folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.samples import Prepared
from tests.objectives import test_ctc, test_videos, test_vision_language
from tests.support.needs import need_pyav
from tests.support.pictures import folder_of_classes

SKIP = "data.on_bad_sample=skip"


def listed_pictures(folder: Path, objective: str, source: str, column: str, *overrides: str) -> RunConfig:
    """A list of pictures, of which one is not there."""
    if not (folder / "list.jsonl").exists():
        names = [str(one.relative_to(folder)) for one in sorted(folder_of_classes(folder / "p").rglob("*.png"))]
        rows = [{"file": name, column: Path(name).parent.name} for name in [*names, "p/gone.png"]]
        (folder / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = (f"data.paths=[{folder / 'list.jsonl'}]", "data.image_column=file", f"data.cache_dir={folder / 'cache'}")
    return compose([f"objective={objective}", f"data={source}", *given, *overrides])[0]


def folder_of_pictures(folder: Path) -> RunConfig:
    if not (folder / "p").exists():
        folder_of_classes(folder / "p")
    shape = ("model=vit_tiny", f"data.paths=[{folder / 'p'}]", f"data.cache_dir={folder / 'cache'}")
    return compose(["objective=image_classification", "data=image_folder", *shape])[0]


def classes(folder: Path) -> RunConfig:
    return listed_pictures(folder, "image_classification", "image_list", "label", "model=vit_tiny", SKIP)


def captions(folder: Path) -> RunConfig:
    small = ("model=clip_tiny", "data.seq_len=16", "model.config.text_config.vocab_size=300", SKIP)
    return listed_pictures(folder, "contrastive", "captions", "caption", *small)


def chats(folder: Path) -> RunConfig:
    return test_vision_language.chats(folder)


def chats_about_videos(folder: Path) -> RunConfig:
    need_pyav()
    return test_videos.chats(folder)


def recordings(folder: Path) -> RunConfig:
    """Of which one is not there."""
    config = test_ctc.listed(folder, SKIP)
    table = folder / "spoken.csv"
    if "gone.wav" not in table.read_text():
        table.write_text(f"{table.read_text().rstrip()}\ngone.wav,one\n")
    return config


@pytest.mark.parametrize("make", [chats, chats_about_videos, captions, classes, folder_of_pictures, recordings])
def test_moved_data_is_the_same_data(tmp_path: Path, make: Callable[[Path], RunConfig]) -> None:
    digests = []
    for name in ("here", "there"):
        if name == "there":
            (tmp_path / "here").rename(tmp_path / "there")
        else:
            (tmp_path / name).mkdir()
        prepared: Prepared = prepare(make(tmp_path / name))
        digests.append((prepared.digest, prepared.validation_digest))
    assert digests[0] == digests[1]


def test_other_pictures_of_the_same_names_are_other_data(tmp_path: Path) -> None:
    before = prepare(chats(tmp_path)).digest
    (tmp_path / "p/dark/0.png").write_bytes((tmp_path / "p/light/1.png").read_bytes())
    assert prepare(chats(tmp_path)).digest != before
