"""A sweep's store: two processes, damage, other versions. Oracle: what was written."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import subprocess
import sys
import time
import types
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import pytest

from mgpu_pipe.cli import main as cli
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.sweep import point as file_points
from mgpu_pipe.sweep import store as stores
from mgpu_pipe.sweep.point import CANCELLED, FINISHED, INTERRUPTED, RUNNING, Point, local_pid, worker_id
from mgpu_pipe.sweep.store import Store, create, find
from mgpu_pipe.system.local_files import replace_file
from tests.sweep.support import asked

POINTS = [[[f"seed={number}"]] for number in range(40)]


@pytest.fixture(params=["sqlite", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(stores, "on_network", lambda folder: request.param == "files")
    made = create(tmp_path, "tried", asked())
    assert made.spec["kind"] == request.param
    return made


def take_all(folder: str) -> list[int]:
    """Take every point that nobody has, as the workers of a sweep do."""
    store, mine = Store(Path(folder)), []
    for point in store.points():
        taken = (
            store.change(point, status=RUNNING, owner=worker_id(), attempts=1) if point.status == "waiting" else None
        )
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
    make = file_points._create

    def late(path: Path) -> bool:
        """Others take and finish the point between our look at it and our turn."""
        monkeypatch.setattr(file_points, "_create", make)
        assert points.change(number, {"status": "waiting"}, {"status": "running"})
        assert points.change(number, {"status": "running"}, {"status": "finished"})
        return make(path)

    monkeypatch.setattr(file_points, "_create", late)
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
    monkeypatch.setattr(file_points, "_await_change", no_room)
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
    assert store.change(seen, status=RUNNING, owner=worker_id(), attempts=2) is None


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
        [sys.executable, "-c", "from mgpu_pipe.sweep.point import worker_id; print(worker_id())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    taken = store.change(point, status=RUNNING, owner=gone, attempts=1)
    assert taken is not None and store.points()[0].status == INTERRUPTED
    again = store.change(store.points()[0], status=RUNNING, owner=worker_id(), attempts=2)
    assert again is not None and store.points()[0].status == RUNNING
    assert store.change(taken, status=FINISHED) is None, "its former owner has nothing to say any more"


IN_A_CONTAINER = """
from pathlib import Path
from mgpu_pipe.runs.lock import RunLock
from mgpu_pipe.sweep.point import worker_id
with RunLock(Path("{}")):
    print(worker_id(), flush=True)
    input()
"""


def test_a_point_that_another_container_of_this_host_runs_is_left_to_it(store: Store, tmp_path: Path) -> None:
    """Its processes have numbers of their own: the first one's is 1, as that of this container's."""
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make a PID namespace (unshare --user --pid)")
    (point,) = store.add([[["seed=1"]]])
    program = [*unshare, sys.executable, "-c", IN_A_CONTAINER.format(tmp_path / ".lock")]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        owner = other.stdout.readline().strip()
        taken = store.change(point, status=RUNNING, owner=owner, attempts=1, begun=0.0, folder=str(tmp_path))
        assert taken is not None and store.points()[0].status == RUNNING
        assert local_pid(owner) is None, "a number of another container is nobody's here: nobody is sent a signal"
        other.communicate("\n")
    assert store.points()[0].status == INTERRUPTED
    assert store.change(store.points()[0], begun=time.time()) and store.points()[0].status == RUNNING, "it starts"


def test_after_a_reboot_a_point_is_interrupted_and_another_hosts_is_watched(store: Store, tmp_path: Path) -> None:
    (point,) = store.add([[["seed=1"]]])
    lock = tmp_path / ".lock"
    lock.touch()
    store.change(point, status=RUNNING, owner="another-boot:1:2", attempts=1, begun=0.0, folder=str(tmp_path))
    one_host = store.spec["kind"] == "sqlite"
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
    settings.write_text(json.dumps({**store.spec, "version": 99}))
    with pytest.raises(BadInputError, match="newer mgpu_pipe"):
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
    with pytest.raises(BadInputError, match="another process locks it"):
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
    from mgpu_pipe.sweep.point import as_point, as_record

    point = Point(3, ("seed=1",), 3, metrics={"val/loss": 2.0})
    assert as_point({**json.loads(json.dumps(as_record(point))), "of_later": 1}, "x") == point


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS number, '{}' AS record FROM n"
PROGRAMS = {
    "a view": f"DROP TABLE points; CREATE VIEW points AS {ENDLESS} WHERE i < 0;",
    "a trigger": f"CREATE TRIGGER t AFTER UPDATE ON points BEGIN SELECT max(number) FROM ({ENDLESS}); END;",
    "a computed column": "DROP TABLE points; CREATE TABLE points (number INTEGER PRIMARY KEY, record AS (hex(1)));",
    "a virtual table": "DROP TABLE points; CREATE VIRTUAL TABLE points USING fts5(number, record);",
    "another table": "CREATE TABLE others (number INTEGER);",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_store_that_holds_a_program_is_refused(name: str, tmp_path: Path) -> None:
    store = create(tmp_path, "tried", asked(), POINTS)
    with closing(sqlite3.connect(store.folder / stores.DATABASE)) as database:
        database.executescript(PROGRAMS[name])
    # in a process of its own: before the repair, only SIGKILL ended it
    code = (
        "import sys; from pathlib import Path; from mgpu_pipe.sweep.store import Store; "
        "Store(Path(sys.argv[1])).points()"
    )
    command = [sys.executable, "-c", code, str(store.folder)]
    looked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "BadInputError: " in looked.stderr
    assert "holds another object than the table of points" in looked.stderr


def test_reading_a_store_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = create(tmp_path, "tried", asked(), POINTS * 100)
    monkeypatch.setattr(stores, "MAX_INSTRUCTIONS", 1 << 12)
    with pytest.raises(BadInputError, match=r"points\.sqlite: reading the sweep's store has no end; restore it"):
        store.points()
