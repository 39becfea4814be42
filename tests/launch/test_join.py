"""Worlds that torchrun or srun started: how they are recognised and what they are checked against."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from mgpu_pipe.config import resolve
from mgpu_pipe.config.freeze import config_hash, freeze
from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig, RunOptions, TrainerConfig
from mgpu_pipe.data.cache import hold_lock
from mgpu_pipe.data.text.prepare_text import PreparedData, prepare
from mgpu_pipe.errors import BadInputError, ConfigError, DataError, WorkerError
from mgpu_pipe.launch import join
from mgpu_pipe.launch.join import OFFER, SharedPlan, _with_its_cause, agree, prepare_on_every_node
from mgpu_pipe.launch.worker import NODE_LOCK, prepared_here, train_in
from mgpu_pipe.launch.workers import is_stopped
from mgpu_pipe.launch.world import World, check_world, joined_store
from mgpu_pipe.runs.lock import process_identity
from mgpu_pipe.runs.resume_command import CommandLine
from mgpu_pipe.system.joined_world import existing_world, hosts, joined_processes, tasks_per_node
from tests.data.support import config as data_config
from tests.launch.launching import until
from tests.support.worlds import free_port

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SRUN = {  # two nodes x two tasks, as Debian's slurm-wlm 22.05 sets them
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "no-such-host-[0-1]",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
}


def test_a_plain_start_launches_its_own_workers() -> None:
    assert existing_world({}) == {}
    assert existing_world({"RANK": "0", "WORLD_SIZE": "2"}) == {}


def test_a_worker_of_our_own_does_not_join() -> None:
    assert existing_world({**TORCHRUN, "MGPU_LIFELINE_FD": "5"}) == {}


def test_variables_that_are_set_to_nothing_make_no_world() -> None:
    assert existing_world(dict.fromkeys(TORCHRUN, "")) == {}


@pytest.mark.parametrize(
    ("world", "name", "value"),
    [
        *((TORCHRUN, "RANK", value) for value in ("x", "2", "-1", "1.0")),
        *((TORCHRUN, "WORLD_SIZE", value) for value in ("0", "two")),
        *((TORCHRUN, "MASTER_PORT", value) for value in ("", "none", "0", "65536")),
        (TORCHRUN, "LOCAL_WORLD_SIZE", "3"),
        (TORCHRUN, "LOCAL_RANK", "2"),
        *((SRUN, name, "x") for name in SRUN if name not in ("SLURM_STEP_NODELIST", "SLURM_LAUNCH_NODE_IPADDR")),
        *((SRUN, name, "") for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_STEP_NODELIST")),
        (SRUN, "SLURM_PROCID", "4"),
        (SRUN, "SLURM_NODEID", "2"),
        (SRUN, "SLURM_LOCALID", "2"),
        (SRUN, "SLURM_STEP_TASKS_PER_NODE", "2(xy)"),
        (SRUN, "MASTER_PORT", "x"),
    ],
)
def test_a_world_that_cannot_be_is_refused_by_the_variable(world: dict[str, str], name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        existing_world({**world, name: value})
    assert caught.value.key == name and "\n" not in str(caught.value)


def test_torchruns_world_is_joined() -> None:
    assert existing_world(TORCHRUN)["RANK"] == "1"


def test_a_step_of_srun_is_joined() -> None:
    world = World.from_environment(existing_world(SRUN))
    assert (world.rank, world.local_rank, world.world_size, world.local_world_size) == (3, 1, 4, 2)
    assert world.master_addr == "127.0.0.1"  # the nodes' names are SLURM's only


def test_a_batch_script_is_no_step() -> None:
    assert existing_world({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == {}


def test_all_tasks_of_a_step_meet_at_the_same_port_and_other_steps_elsewhere() -> None:
    ports = {existing_world({**SRUN, "SLURM_PROCID": str(rank)})["MASTER_PORT"] for rank in range(4)}
    assert len(ports) == 1
    assert existing_world({**SRUN, "SLURM_STEP_ID": "1"})["MASTER_PORT"] not in ports


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("gpu[03-05,9],login", "gpu03 gpu04 gpu05 gpu9 login"),
        ("a,b", "a b"),
        ("one", "one"),
        ("n[7,9-10]-ib", "n7-ib n9-ib n10-ib"),
        ("r[1-2]n[08-09]", "r1n08 r1n09 r2n08 r2n09"),
    ],
)
def test_the_nodes_of_a_list(nodes: str, names: str) -> None:
    assert hosts(nodes) == names.split()


def test_tasks_of_each_node() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("environment", "world", "here"),
    [
        ({**TORCHRUN, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 8, 4),
        (TORCHRUN, 2, 2),
        (SRUN, 4, 2),
        ({**TORCHRUN, "MGPU_LIFELINE_FD": "5"}, 2, 2),
    ],
)
def test_sizes_of_a_joined_world_are_its_environments_not_the_visible_gpus(
    environment: dict[str, str], world: int, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under ``srun --gpus-per-task=1``; a launcher's own worker sees what the launcher saw."""
    own = "MGPU_LIFELINE_FD" in environment
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(resolve, "usable_gpus", lambda: 2 if own else 1)
    trainer = TrainerConfig(accelerator="cuda", num_nodes=world // here)
    strategy = StrategyConfig(name="tp", tp="auto")
    assert joined_processes() == (None if own else (world, here))
    assert (resolve.world_size(trainer, strategy), resolve.devices_per_node(trainer, strategy)) == (world, here)


def world_of(world_size: int, local_world_size: int) -> World:
    return World(0, 0, world_size, local_world_size, "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("trainer", "world", "said"),
    [
        (TrainerConfig(devices=3), world_of(2, 2), r"trainer.devices=3: .*; use 2"),
        (TrainerConfig(devices=2), world_of(4, 2), r"trainer.num_nodes=1: .*; use 2"),
        (TrainerConfig(devices=2, num_nodes=2), world_of(2, 2), r"trainer.num_nodes=2: .*; use 1"),
    ],
)
def test_a_configuration_for_another_world_is_refused_with_the_fix(
    trainer: TrainerConfig, world: World, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_world(world, trainer, StrategyConfig())


def test_a_fitting_configuration_passes() -> None:
    check_world(world_of(4, 2), TrainerConfig(devices=2, num_nodes=2), StrategyConfig())
    check_world(world_of(2, 2), TrainerConfig(), StrategyConfig(name="ddp"))


class Node:
    """One rank, alone on its node, in a thread: what it made of the data, or its error."""

    def __init__(self, rank: int, config: RunConfig, paths: RunPaths, store: HashStore) -> None:
        self.made: Any = None
        self.error: BaseException | None = None

        def prepare_here() -> None:
            try:
                self.made, _ = prepare_on_every_node(
                    World(rank, 0, 2, 1, "127.0.0.1", 0), store, partial(prepared_here, config, paths)
                )
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=prepare_here, daemon=True)
        self.thread.start()


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[RunConfig, PreparedData, list[RunPaths]]:
    """A run's folder as two nodes see it: what rank 0 prepared is not on the second one."""
    config = data_config(tmp_path, source="synthetic")
    prepared, found = prepare(config), []
    for node, folder in enumerate((prepared.folder, tmp_path / "not-here")):
        paths = RunPaths(tmp_path / f"node-{node}")
        paths.root.mkdir()
        paths.data.write_text(json.dumps(replace(prepared, folder=folder).as_dict()))
        found.append(paths)
    return config, prepared, found


@pytest.mark.parametrize("each", [1, 2])
def test_a_rank_that_leaves_before_its_data_is_named_by_rank_zero(tmp_path: Path, each: int) -> None:
    store, config = HashStore(), data_config(tmp_path, source="synthetic")
    offer = SharedPlan(str(tmp_path), "another-hash", "", 1, train=True)
    store.set(OFFER, json.dumps(asdict(offer)))
    world = World(each, 0, 2 * each, each, "127.0.0.1", 0)
    with pytest.raises(ConfigError, match="rank 0 composed another configuration"), ExitStack() as resources:
        agree(config, world, CommandLine([], []), store, resources, each)
    with pytest.raises(BadInputError, match=r"rank 1: config=.*rank 0 composed another configuration"):
        prepare_on_every_node(World(0, 0, 2, 1, "127.0.0.1", 0), store, lambda: None)  # type: ignore[arg-type, return-value]


def test_ranks_that_do_not_meet_end_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorkerError, match=rf"rank 0: .*127.0.0.1:{port} within 1 s .*launch.collective_timeout"):
        joined_store(1)


def test_a_node_without_the_data_prepares_it_and_the_others_wait_without_a_time_out(
    nodes: tuple[RunConfig, PreparedData, list[RunPaths]],
) -> None:
    config, prepared, paths = nodes
    store = HashStore()
    assert config.data.cache_dir is not None
    with hold_lock(Path(config.data.cache_dir) / NODE_LOCK):  # another process of the second node is preparing
        ranks = [Node(rank, config, paths[rank], store) for rank in range(2)]
        ranks[0].thread.join(1.0)
        assert all(rank.thread.is_alive() for rank in ranks)
        assert not dist.is_initialized()  # no time-out is running
    for rank in ranks:
        rank.thread.join(60)
        assert rank.error is None and rank.made is not None and rank.made.digest == prepared.digest
    assert ranks[1].made is not None and ranks[1].made.folder.exists()


def test_what_one_node_cannot_prepare_ends_all_with_its_reason(
    nodes: tuple[RunConfig, PreparedData, list[RunPaths]],
) -> None:
    config, _, paths = nodes
    paths[1].data.write_text(paths[1].data.read_text().replace('"digest": "', '"digest": "other'))
    store = HashStore()
    ranks = [Node(rank, config, paths[rank], store) for rank in range(2)]
    for rank in ranks:
        rank.thread.join(60)
    assert isinstance(ranks[1].error, DataError)
    assert isinstance(ranks[0].error, BadInputError) and "rank 1: " in str(ranks[0].error)
    assert "give all nodes the same files" in str(ranks[0].error)


def test_a_stopped_peer_is_named_where_its_world_has_no_launcher_that_watches() -> None:
    waited = RuntimeError("[gloo] Timed out waiting 600000ms for recv operation to complete")
    sleeper = subprocess.Popen(["sleep", "600"])
    peers = {0: process_identity(os.getpid()), 1: process_identity(sleeper.pid)}
    try:
        assert _with_its_cause(waited, 0, peers) is waited
        sleeper.send_signal(signal.SIGSTOP)
        until(lambda: is_stopped(sleeper.pid), "the stop")
        assert "rank 1's process" in str(_with_its_cause(waited, 0, peers))
        defect = ValueError("rank 0 has a defect")
        assert _with_its_cause(defect, 0, peers) is defect
    finally:
        sleeper.kill()
        sleeper.wait()


def test_rank_zero_of_a_complete_run_stays_until_the_others_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, config = HashStore(), RunConfig(run=RunOptions(dir=str(tmp_path)))
    complete = SharedPlan(str(tmp_path), config_hash(config), "", 1, train=False)
    monkeypatch.setattr(join, "_prepare_attempt", lambda *_: complete)

    def rank_zero() -> None:
        with ExitStack() as resources:
            agree(config, World(0, 0, 2, 2, "127.0.0.1", 0), CommandLine([], []), store, resources)

    first = threading.Thread(target=rank_zero, daemon=True)
    first.start()
    first.join(1.0)
    assert first.is_alive()  # the store leaves with its process
    with ExitStack() as resources:
        shared, _ = agree(config, World(1, 1, 2, 2, "127.0.0.1", 0), CommandLine([], []), store, resources)
    assert shared == complete
    first.join(5.0)
    assert not first.is_alive()


def test_a_rank_that_did_not_plan_takes_rank_zeros_plan(tmp_path: Path) -> None:
    store, asks = HashStore(), RunConfig(strategy=StrategyConfig(name="auto"), run=RunOptions(dir=str(tmp_path)))
    asks = replace(
        asks, data=replace(asks.data, micro_batch_size="max"), checkpoint=replace(asks.checkpoint, every_n_steps="auto")
    )
    planned = replace(
        asks,
        strategy=StrategyConfig(name="fsdp", dp_shard="auto"),
        data=replace(asks.data, micro_batch_size=4),
        checkpoint=replace(asks.checkpoint, every_n_steps=7),
        plan=replace(asks.plan, predicted_seconds=0.1 + 0.2, predicted_gib=1 / 3),
    )
    freeze(planned, RunPaths(tmp_path).config)
    plan = SharedPlan(str(tmp_path), config_hash(planned), "", 1, train=True)
    store.set(join.OFFER, json.dumps(asdict(plan)))
    assert join._plan_from_rank_zero(asks, store, 1) == plan
    for other in (
        replace(asks, seed=asks.seed + 1),
        replace(asks, strategy=StrategyConfig(name="ddp")),
        replace(asks, checkpoint=replace(asks.checkpoint, every_n_steps=8)),
    ):
        with pytest.raises(ConfigError, match="the nodes' configurations differ"):
            join._plan_from_rank_zero(other, store, 1)


def test_a_complete_run_needs_no_plan(tmp_path: Path) -> None:
    store, asks = HashStore(), RunConfig(strategy=StrategyConfig(name="auto"))
    plan = SharedPlan(str(tmp_path), "of the plan", "", 1, train=False)
    store.set(join.OFFER, json.dumps(asdict(plan)))
    assert join._plan_from_rank_zero(asks, store, 1) == plan


def test_no_worker_trains_what_nobody_planned(tmp_path: Path) -> None:
    nothing: Any = None
    config = RunConfig(strategy=StrategyConfig(name="auto"))
    with pytest.raises(AssertionError, match=r"no launch planned strategy$"):
        train_in(World(0, 0, 1, 1, "127.0.0.1", 0), config, RunPaths(tmp_path), nothing, nothing, resume=None)
