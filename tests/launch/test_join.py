"""Worlds that torchrun or srun started: how they are recognised and what they are checked against."""

from __future__ import annotations

import pytest

from mgpu_pipe.config.schema import RunConfig, StrategyConfig, TrainerConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.launch.distributed import World
from mgpu_pipe.launch.join import check_world, existing_world, first_host, tasks_per_node

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SRUN = {  # two nodes x two tasks, as Debian's slurm-wlm 22.05 sets them
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "no-such-host-[0-1]",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
}  # fmt: skip


def test_a_plain_start_launches_its_own_workers() -> None:
    assert existing_world({}) == {}
    assert existing_world({"RANK": "0", "WORLD_SIZE": "2"}) == {}


def test_a_worker_of_our_own_does_not_join() -> None:
    assert existing_world({**TORCHRUN, "MGPU_LIFELINE_FD": "5"}) == {}


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
    ("nodes", "first"), [("gpu[03-05,9],login", "gpu03"), ("a,b", "a"), ("one", "one"), ("n[7,9-12]", "n7")]
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_tasks_of_each_node() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


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
        check_world(RunConfig(trainer=trainer), world)


def test_a_fitting_configuration_passes() -> None:
    check_world(RunConfig(trainer=TrainerConfig(devices=2, num_nodes=2)), world_of(4, 2))
    check_world(RunConfig(strategy=StrategyConfig(name="ddp")), world_of(2, 2))
