"""Which step is taken: the newest that is whole, with what is wrong about the others told."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from mgpu_pipe.checkpoint import layout
from mgpu_pipe.checkpoint.selection import list_steps, newest_valid, resolve_source
from mgpu_pipe.errors import CheckpointError
from tests.checkpoint.support import flip_bit, rewrite, save_alone

MODEL = "model-00000.safetensors"


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in (10, 20, 30):
        save_alone(root, step)
    return root


@pytest.fixture
def root(three_steps: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three_steps, tmp_path / "run" / "checkpoints"))


def _newest(root: Path, verify: str = "full") -> int | None:
    found = newest_valid(root, "fallback", verify)  # type: ignore[arg-type]
    return found.step if found else None


def test_the_newest_step_is_taken(root: Path) -> None:
    found = newest_valid(root)
    assert found is not None and found.path == root / "step-00000030"
    assert [(info.step, info.whole) for info in list_steps(root)] == [(10, True), (20, True), (30, True)]


def test_clocks_do_not_decide(root: Path) -> None:
    """A clock that was set back between saves gives the later step the earlier times."""
    for age, path in enumerate(sorted(root.iterdir())):
        for file in (*path.iterdir(), path):
            os.utime(file, (1_000_000 - 1000 * age, 1_000_000 - 1000 * age))
    assert _newest(root) == 30


def test_there_is_none_in_a_folder_that_is_empty_or_missing(tmp_path: Path) -> None:
    assert newest_valid(tmp_path) is None and newest_valid(tmp_path / "nothing") is None
    assert list_steps(tmp_path / "nothing") == []


def test_a_damaged_step_is_named_and_the_one_before_it_is_taken(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip_bit(root / "step-00000030" / MODEL, 4 * 1024 * 1024 + 1)
    with caplog.at_level(logging.WARNING):
        assert _newest(root) == 20
    assert f"step-00000030/{MODEL}: chunk 1 of 2" in caplog.text
    assert _newest(root, "size") == 30
    with pytest.raises(CheckpointError, match=r"step-00000030/.*chunk 1 of 2.*on_corruption=fallback"):
        newest_valid(root, "stop")


def test_a_step_of_another_version_is_no_damage_and_the_one_before_it_is_not_taken(root: Path) -> None:
    path = root / "step-00000030" / "manifest.json"
    rewrite(path.parent, lambda manifest: manifest.update(format_version=7))
    with pytest.raises(CheckpointError, match=r"format version 7; .* use the version of mgpu_pipe that wrote it"):
        newest_valid(root)
    path.write_text(path.read_text().replace('"format_version":7', '"format_version":3'))  # this is damage
    assert _newest(root) == 20


def test_damage_of_several_steps_falls_back_past_them(root: Path) -> None:
    (root / "step-00000030" / "manifest.json").unlink()
    (root / "step-00000020" / MODEL).write_bytes(b"")
    assert _newest(root, "size") == 10
    shutil.rmtree(root / "step-00000010")
    assert _newest(root) is None
    assert [(info.step, info.whole) for info in list_steps(root)] == [(20, False), (30, False)]


@pytest.mark.parametrize("suffix", [".partial", ".deleting", ".tmp", "x"])
def test_a_folder_that_was_never_committed_is_never_taken(suffix: str, root: Path) -> None:
    (root / "step-00000030").rename(root / f"step-00000030{suffix}")
    assert _newest(root) == 20


@pytest.mark.parametrize("name", ["step-40", "step-0000000000040", "epoch-00000040", "step-00000040-best"])
def test_a_folder_with_another_name_is_never_taken(name: str, root: Path) -> None:
    (root / "step-00000030").rename(root / name)
    assert _newest(root) == 20


def test_a_folder_renamed_to_another_step_is_not_believed(root: Path) -> None:
    (root / "step-00000030").rename(root / "step-00000099")
    assert _newest(root) == 20


def test_steps_beyond_eight_digits_sort_as_numbers(root: Path) -> None:
    assert layout.step_folder(root, 123_456_789).name == "step-123456789"
    save_alone(root, 123_456_789)
    assert _newest(root) == 123_456_789


def test_a_step_being_replaced_counts_under_its_old_name(root: Path) -> None:
    (root / "step-00000030").rename(root / "step-00000030.replaced")
    found = newest_valid(root)
    assert found is not None and found.path == root / "step-00000030.replaced"
    layout.clean(root)
    assert _newest(root) == 30 and not (root / "step-00000030.replaced").exists()


@pytest.mark.parametrize("inner", ["", "checkpoints", "checkpoints/step-00000030"])
def test_a_source_is_a_run_its_checkpoints_or_a_step(inner: str, root: Path) -> None:
    assert resolve_source(str(root.parent / inner)) == root / "step-00000030"


def test_a_copied_step_under_another_name_is_a_source(root: Path) -> None:
    (root / "step-00000030").rename(root.parent / "my-favourite")
    assert resolve_source(root.parent / "my-favourite") == root.parent / "my-favourite"


def test_a_source_without_a_usable_checkpoint_is_refused_with_its_key(root: Path, tmp_path: Path) -> None:
    for source, words in ((tmp_path / "nothing", "no such folder"), (tmp_path, "holds no checkpoint")):
        with pytest.raises(CheckpointError, match=f"checkpoint.init_from={source}: {words}"):
            resolve_source(source, key="checkpoint.init_from")
    flip_bit(root / "step-00000030" / MODEL, 100)
    with pytest.raises(CheckpointError, match=r"step-00000030: .*chunk 0 of 2"):
        resolve_source(root / "step-00000030")
    assert resolve_source(root.parent) == root / "step-00000020"
    with pytest.raises(CheckpointError, match="chunk 0"):
        resolve_source(root.parent, on_corruption="stop")
    (root / "step-00000020").rename(root / "step-00000020.partial")
    with pytest.raises(CheckpointError, match="unfinished"):
        resolve_source(root / "step-00000020.partial")
    (root / "step-00000010" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in it is whole \(2 damaged\)"):
        resolve_source(root.parent)


def test_selection_and_retention_do_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import sys; from mgpu_pipe.checkpoint import selection, tensor_file; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
