"""Which checkpoints stay, and that a deletion is never seen half done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mgpu_pipe.checkpoint import file_operations as files
from mgpu_pipe.checkpoint import layout
from mgpu_pipe.checkpoint.save import save
from mgpu_pipe.checkpoint.selection import list_steps, mark_ruined, newest_valid, prune, ruined_steps
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from tests.checkpoint.support import config_file, flip_bit


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in range(10, 70, 10):
        _save(tmp_path / "checkpoints", step)
    return tmp_path / "checkpoints"


def _save(root: Path, step: int) -> None:
    shard = LocalShard(TensorSlice.whole("w", (3,)), (3,), torch.full((3,), float(step)))
    save(root, step, [shard], [], {}, config_file(root.parent))


def _steps(root: Path) -> list[int]:
    return [info.step for info in list_steps(root) if info.whole]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "best", "followed_before", "kept"),
    [
        (0, None, [], 61, [10, 20, 30, 40, 50, 60]),
        (1, None, [], 61, [60]),
        (2, None, [], 61, [50, 60]),
        (99, None, [], 61, [10, 20, 30, 40, 50, 60]),
        (1, 20, [], 61, [20, 40, 60]),
        (1, None, [10, 30], 61, [10, 30, 60]),
        (2, 30, [10, 999], 61, [10, 30, 50, 60]),
        (-1, None, [], 61, [60]),
        # The newest may be ruined already: the newest that a finite step followed stays besides.
        (1, None, [], None, [50, 60]),
        (1, None, [], 60, [50, 60]),
        (2, None, [], 60, [50, 60]),
        (1, 20, [10], None, [10, 20, 40, 50, 60]),
        # fp16 skipped the steps after 30: those were not finite.
        (1, None, [], 31, [30, 60]),
        (2, None, [], 31, [30, 50, 60]),
        (1, None, [], 0, [60]),
    ],
)
def test_the_last_every_best_and_followed_stay(
    keep_last: int, keep_every: int | None, best: list[int], followed_before: int | None, kept: list[int], root: Path
) -> None:
    deleted = prune(root, keep_last, keep_every, best, followed_before=followed_before)
    assert _steps(root) == kept and deleted == sorted({10, 20, 30, 40, 50, 60} - set(kept))
    assert sorted(path.name for path in root.iterdir()) == [layout.step_folder(root, step).name for step in kept]


def test_a_damaged_step_does_not_take_a_good_ones_place(root: Path) -> None:
    (root / "step-00000060" / "model-00000.safetensors").write_bytes(b"")
    assert prune(root, 1) == [10, 20, 30]
    assert _steps(root) == [40, 50] and (root / "step-00000060").exists()


def test_a_later_step_that_the_run_did_not_go_on_from_takes_no_place(root: Path) -> None:
    """Step 60 has its size and a flipped bit: the run went on from 50, and was stopped at 55."""
    flip_bit(root / "step-00000060" / "model-00000.safetensors", 90)
    _save(root, 55)
    assert prune(root, 1, newest=55) == [10, 20, 30, 40]
    assert prune(root, 1, newest=55, followed_before=56) == [50]
    found = newest_valid(root)
    assert found is not None and found.step == 55 and (root / "step-00000060").exists()


def test_a_ruined_step_takes_no_place_is_taken_by_nothing_and_is_forgotten_when_saved_again(root: Path) -> None:
    mark_ruined(root, [50, 60])
    assert ruined_steps(root) == {50, 60}
    found = newest_valid(root)
    assert found is not None and found.step == 40
    assert prune(root, 1) == [10, 20] and _steps(root) == [30, 40, 50, 60]
    _save(root, 60)  # the same content: still ruined
    assert ruined_steps(root) == {50, 60}
    save(root, 60, [LocalShard(TensorSlice.whole("w", (3,)), (3,), torch.ones(3))], [], {}, config_file(root.parent))
    assert ruined_steps(root) == {50}
    found = newest_valid(root)
    assert found is not None and found.step == 60
    mark_ruined(root, [60])
    assert ruined_steps(root) == {50, 60}


def test_a_ruined_step_is_taken_where_there_is_no_other(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    _save(root, 10)
    _save(root, 20)
    mark_ruined(root, [10, 20])
    found = newest_valid(root)
    assert found is not None and found.step == 20


@pytest.mark.parametrize("content", [b"", b"[]", b'{"60": 3}', b'{"x": "y"}', b"\xff", b'{"60": "00"}', None])
def test_a_mark_that_cannot_be_read_marks_nothing(content: bytes | None, root: Path, tmp_path: Path) -> None:
    if content is None:
        (root / "ruined.json").symlink_to("/etc/passwd")
    else:
        (root / "ruined.json").write_bytes(content)
    assert ruined_steps(root) == set()
    mark_ruined(root, [60])
    assert ruined_steps(root) == {60} and not (root / "ruined.json").is_symlink()


def test_a_deletion_that_is_cut_short_leaves_nothing_that_looks_like_a_checkpoint(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        (path / "manifest.json").unlink()
        raise OSError(5, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(files, "remove_folder", fail)
        with pytest.raises(OSError, match="Input/output"):
            prune(root, 5)
    assert (root / "step-00000010.deleting").exists()
    assert _steps(root) == [20, 30, 40, 50, 60]
    _save(root, 70)
    assert not (root / "step-00000010.deleting").exists()


def test_a_step_with_a_leftover_of_its_replacement_is_deleted_for_good(root: Path) -> None:
    (root / "step-00000020").rename(root / "step-00000010.replaced")
    prune(root, 1)
    found = newest_valid(root)
    assert _steps(root) == [50, 60] and found is not None and found.step == 60
    assert sorted(path.name for path in root.iterdir()) == ["step-00000050", "step-00000060"]


@pytest.mark.parametrize("suffix", ["", ".partial", ".deleting", ".replaced"])
def test_a_symbolic_link_in_a_steps_place_is_never_followed_to_delete(suffix: str, root: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (root / "step-00000010").rename(precious)
    kept = sorted(path.name for path in precious.iterdir())
    (root / f"step-00000010{suffix}").symlink_to(precious)
    _save(root, 70)
    prune(root, 1)
    assert sorted(path.name for path in precious.iterdir()) == kept
    # a link is no checkpoint of this run: one in a step's own place stays for somebody to look at
    assert [path.name for path in sorted(root.iterdir()) if not path.is_symlink()] == ["step-00000060", "step-00000070"]
