"""A sweep's store: two processes, damage, other versions. Oracle: what was written."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
import types
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from mgpu_pipe import cli
from mgpu_pipe.config.replace_file import replace_file
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.sweep import file_points
from mgpu_pipe.sweep import store as stores
from mgpu_pipe.sweep.point import CANCELLED, FINISHED, INTERRUPTED, RUNNING, Point, me
from mgpu_pipe.sweep.store import Store, create, find
from tests.sweep.support import asked

POINTS = [[[f"seed={number}"]] for number in range(40)]


@pytest.fixture(params=["sqlite", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(stores, "on_network", lambda folder: request.param == "files")
    made = create(tmp_path, "tried", asked())
    assert made.asked["kind"] == request.param
    return made


def take_all(folder: str) -> list[int]:
    """Take every point that nobody has, as the workers of a sweep do."""
    store, mine = Store(Path(folder)), []
    for point in store.points():
        taken = store.change(point, status=RUNNING, owner=me(), attempts=1) if point.status == "waiting" else None
        if taken is not None:
            mine.append(taken.number)
            store.change(taken, status=FINISHED, owner="")
    return mine


def test_no_point_is_taken_twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add(POINTS)
    read = json.loads

    def slowly(text: str) -> object:
        """Time for the others, between reading a record and writing it."""
        time.sleep(0.002)
        return read(text)

    monkeypatch.setattr(stores, "json", types.SimpleNamespace(loads=slowly, dumps=json.dumps))
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        taken = [number for mine in pool.map(take_all, [str(store.folder)] * 4) for number in mine]
    assert sorted(taken) == list(range(1, 41))
    assert {point.status for point in store.points()} == {FINISHED}


def test_a_change_that_comes_late_does_not_undo_two_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points, number = file_points.FilePoints(tmp_path / "points"), 1
    points.add([{"number": number, "status": "waiting", "version": 0}])
    make = file_points._made

    def late(path: Path) -> bool:
        """Others take and finish the point between our look at it and our turn."""
        monkeypatch.setattr(file_points, "_made", make)
        assert points.change(number, {"status": "waiting"}, {"status": "running"})
        assert points.change(number, {"status": "running"}, {"status": "finished"})
        return make(path)

    monkeypatch.setattr(file_points, "_made", late)
    assert not points.change(number, {"status": "waiting"}, {"status": "running"})
    assert points.all() == [{"number": number, "status": "finished", "version": 2}]


def test_of_two_that_give_up_on_a_dead_one_the_first_has_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = file_points.FilePoints(tmp_path / "points")
    points.add([{"number": 1, "status": "waiting", "version": 0}])
    taken = tmp_path / "points" / "1.1.taken"
    taken.touch()  # a process died here
    looks = 0

    def look(seconds: float) -> None:
        """Another gives up before us, begins its own change, and ends it a little later."""
        nonlocal looks
        looks += 1
        if looks == 5:
            taken.unlink()
            taken.touch()
        if looks == 15:
            record = {"number": 1, "status": "running", "version": 1}
            (tmp_path / "points" / "1.json").write_text(json.dumps(record))

    monkeypatch.setattr(file_points, "STALE_S", 0.1)
    monkeypatch.setattr(file_points, "time", types.SimpleNamespace(sleep=look, monotonic=lambda: looks * 0.01))
    assert not points.change(1, {"status": "waiting"}, {"status": "running"})
    assert looks == 15


def test_a_change_for_which_there_is_no_room_is_not_outwaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = file_points.FilePoints(tmp_path / "points")
    points.add([{"number": 1, "status": "waiting", "version": 0}])
    with monkeypatch.context() as full, pytest.raises(OSError, match="No space"):
        full.setattr(file_points, "replace_file", no_room)
        points.change(1, {"status": "waiting"}, {"status": "running"})
    monkeypatch.setattr(file_points, "_outwait", no_room)
    assert points.change(1, {"status": "waiting"}, {"status": "running"})


def no_room(*given: object, **named: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_sweep_that_is_killed_while_it_begins_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "on_network", lambda folder: True)

    def killed(path: Path, content: str, flush: bool) -> None:
        if path.name == "3.json":
            raise KeyboardInterrupt
        replace_file(path, content, flush)

    with monkeypatch.context() as kill, pytest.raises(KeyboardInterrupt):
        kill.setattr(file_points, "replace_file", killed)
        create(tmp_path, "mine", asked(), POINTS)
    with pytest.raises(BadInputError, match="no such sweep"):
        find(tmp_path, "mine")
    assert len(create(tmp_path, "mine", asked(), POINTS).points()) == 40


def test_an_interrupted_point_that_was_cancelled_is_not_taken_any_more(store: Store) -> None:
    (point,) = store.add([[["seed=1"]]])
    assert store.change(point, status=RUNNING, owner="gone:1:1", attempts=1)
    (seen,) = store.points()
    assert seen.status == INTERRUPTED and store.change(seen, status=CANCELLED)
    assert store.change(seen, status=RUNNING, owner=me(), attempts=2) is None


def add_ten(folder: str) -> list[int]:
    return [point.number for _ in range(10) for point in Store(Path(folder)).add([[["seed=1"], ["seed=2"]]])]


def test_points_that_are_added_at_once_all_get_numbers(store: Store) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        numbers = [number for mine in pool.map(add_ten, [str(store.folder)] * 4) for number in mine]
    assert sorted(numbers) == list(range(1, 81))
    assert all(point.trial in (point.number, point.number - 1) for point in store.points())


def test_a_point_whose_process_is_gone_is_interrupted_and_can_be_taken(store: Store) -> None:
    (point,) = store.add([[["seed=1"]]])
    gone = subprocess.run(
        [sys.executable, "-c", "from mgpu_pipe.sweep.point import me; print(me())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    taken = store.change(point, status=RUNNING, owner=gone, attempts=1)
    assert taken is not None and store.points()[0].status == INTERRUPTED
    again = store.change(store.points()[0], status=RUNNING, owner=me(), attempts=2)
    assert again is not None and store.points()[0].status == RUNNING
    assert store.change(taken, status=FINISHED) is None, "its former owner has nothing to say any more"


def test_after_a_reboot_a_point_is_interrupted_and_another_hosts_is_watched(store: Store, tmp_path: Path) -> None:
    (point,) = store.add([[["seed=1"]]])
    lock = tmp_path / ".lock"
    lock.touch()
    store.change(point, status=RUNNING, owner="another-boot:1:2", attempts=1, begun=0.0, folder=str(tmp_path))
    one_host = store.asked["kind"] == "sqlite"
    assert store.points()[0].status == (INTERRUPTED if one_host else RUNNING)
    os.utime(lock, (0, 0))  # its lease was not renewed for long
    assert store.points()[0].status == INTERRUPTED


def test_values_of_any_text_come_back(store: Store) -> None:
    overrides = ["data.paths=['a, b=c.txt','it\\'s \"so\"']", "run.tags=[x]", "+model.config.ü=1"]
    store.add([[overrides]])
    assert store.points()[0].overrides == tuple(overrides)
    assert store.points()[0].settings["data.paths"] == "['a, b=c.txt','it\\'s \"so\"']"


@pytest.mark.parametrize("name", ["a/b", "..", "", ".hidden"])
def test_a_name_that_is_no_folders_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plain folder name"):
        create(tmp_path, name, asked())
    assert not (tmp_path / "sweeps").exists()


def test_a_name_that_is_taken_is_refused_and_unnamed_ones_are_told_apart(tmp_path: Path) -> None:
    first = create(tmp_path, "mine", asked())
    first.add([[["seed=1"]]])
    with pytest.raises(ConfigError, match="sweeps resume mine"):
        create(tmp_path, "mine", asked())
    assert len(first.points()) == 1
    assert len({create(tmp_path, None, asked()).name for _ in range(3)}) == 3
    assert len(stores.stores(tmp_path)) == 4 and find(tmp_path, "mine").folder == first.folder


def test_damage_and_newer_versions_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create(tmp_path, "whole", asked())
    store = create(tmp_path, "mine", asked())
    store.add(POINTS)
    database, settings = store.folder / "points.sqlite", store.folder / "sweep.json"
    whole = database.read_bytes()
    database.write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(BadInputError, match="store is damaged"):
        store.points()
    assert cli.main(["sweeps", "list", f"run.root={tmp_path}"]) == 0
    said = capsys.readouterr()
    assert "mine/points.sqlite: the sweep's store is damaged" in said.err and "\n1 sweep\n" in said.out, said
    database.write_bytes(whole)
    assert len(store.points()) == 40
    settings.write_text(json.dumps({**store.asked, "version": 99}))
    with pytest.raises(BadInputError, match="newer version"):
        Store(store.folder)
    settings.write_text("{")
    with pytest.raises(BadInputError, match="cannot be read"):
        Store(store.folder)
    with pytest.raises(BadInputError, match="no such sweep"):
        find(tmp_path, "other")


def test_a_store_that_is_held_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3

    monkeypatch.setattr(stores, "BUSY_S", 0.1)
    store = create(tmp_path, "mine", asked())
    (point,) = store.add([[["seed=1"]]])
    holder = sqlite3.connect(store.folder / "points.sqlite")
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(BadInputError, match="another process holds it"):
        store.change(point, status=FINISHED)
    holder.close()
    assert store.change(point, status=FINISHED) is not None


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/dev/full").exists(), reason="needs a full device")
def test_a_full_disk_is_told_and_nothing_is_lost(tmp_path: Path) -> None:
    import resource

    store = create(tmp_path, "mine", asked())
    store.add(POINTS)

    def add_much() -> str:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            Store(store.folder).add([[["x" * 100_000]]])
        except BadInputError as error:
            return str(error)
        return ""

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, add_much().encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as told:
        assert "sweep's store" in told.read()
    assert len(Store(store.folder).points()) == 40


def test_a_later_versions_entries_are_left_out() -> None:
    from mgpu_pipe.sweep.point import as_record, from_record

    point = Point(3, ("seed=1",), 3, metrics={"val/loss": 2.0})
    assert from_record({**as_record(point), "of_later": 1}) == point
