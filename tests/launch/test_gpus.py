"""The ranks' GPUs, compared, and what CUDA and NCCL say where they cannot start; the GPUs are made up."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.launch import world as variables
from mgpu_pipe.launch.process_group import Gpu, _explained_start_errors, compare, fault
from mgpu_pipe.runs.environment import describe_environment
from mgpu_pipe.system.hardware import Threads

FIRST = Gpu("n0", "boot-0", "GPU-a", "H100", (9, 0))
SECOND = replace(FIRST, uuid="GPU-b")
FAR = replace(FIRST, node="n1", machine="boot-1")


def heard(gpus: Sequence[Gpu]) -> list[str]:
    """What every rank is told, each in a thread."""
    store = HashStore()

    def rank(number: int) -> str:
        try:
            compare(store, number, len(gpus), gpus[number])
        except BadInputError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(gpus)) as threads:
        return list(threads.map(rank, range(len(gpus))))


def test_every_rank_hears_that_two_see_the_same_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    same = "ranks 0 and 2 see the same GPU (H100 GPU-a of node n0): start one process for each GPU"
    told = heard([FIRST, SECOND, FIRST])
    assert len(set(told)) == 1 and told[0].startswith(same)
    assert heard([FIRST, SECOND, FAR]) == [""] * 3, "machines give the same name to different GPUs"
    assert capsys.readouterr().err == ""


def test_gpus_of_several_kinds_are_told_and_refused_where_results_would_differ(
    capsys: pytest.CaptureFixture[str],
) -> None:
    older = replace(SECOND, name="A100", capability=(8, 0))
    assert heard([FIRST, older]) == ["", ""]
    kinds = "the ranks see different GPUs: H100 (from rank 0 on), A100 (from rank 1 on)"
    assert capsys.readouterr().err == f"note: {kinds}: a step takes as long as on the slowest\n"
    oldest = replace(SECOND, name="T4", capability=(7, 5))
    assert fault([FIRST, oldest]).endswith(
        "T4 (from rank 1 on): some compute in bf16 and some do not; use nodes of one kind"
    )


def test_a_start_that_cuda_or_nccl_refuses_is_one_line() -> None:
    for said, told in (
        (
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors",
            "its GPU is in use by anot",
        ),
        (
            "NCCL error in: x.cpp:1\nLast error:\nBootstrap : no socket interface found",
            "NCCL finds no network interface",
        ),
    ):
        with pytest.raises(BadInputError, match=f"^rank 3 cannot start: {told}") as raised, _explained_start_errors(3):
            raise RuntimeError(said)
        assert "\n" not in str(raised.value)
    with pytest.raises(RuntimeError, match="another"), _explained_start_errors(3):
        raise RuntimeError("another")


def test_processes_on_gpus_get_variables_that_the_user_has_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = compose([])
    for name in (*variables.GPU_DEFAULTS, variables.ALLOCATOR_BEFORE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(variables, "device_type", lambda _: "cuda")
    assert variables.gpu_environment(config.trainer) == variables.GPU_DEFAULTS
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert variables.gpu_environment(config.trainer) == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, (
        "one of the allocator's is enough"
    )
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    recorded = describe_environment(
        ["mgpu-pipe"], Threads(1, ""), 2, worker_variables={"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    )
    told = dict(recorded["variables"])  # type: ignore[call-overload]
    wanted = {"NCCL_IB_HCA": "mlx5", "TORCH_FR_BUFFER_SIZE": "7", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert wanted.items() <= told.items() and "WANDB_API_KEY" not in told
    monkeypatch.setattr(variables, "device_type", lambda _: "cpu")
    assert variables.gpu_environment(config.trainer) == {}


@pytest.mark.parametrize(
    ("selection", "nodes", "interface"),
    [("eth", 2, "eth0"), ("=eth1", 2, "eth1"), ("^lo", 2, None), ("", 2, None), ("ib", 2, None), ("eth", 1, "lo")],
)
def test_gloo_takes_the_interface_of_nccl_on_several_nodes(
    monkeypatch: pytest.MonkeyPatch, selection: str, nodes: int, interface: str | None
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1")])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", selection)
    world = variables.World(0, 0, 2 * nodes, 2, "127.0.0.1", 0)
    assert world.thread_environment(1).get("GLOO_SOCKET_IFNAME") == interface
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert "GLOO_SOCKET_IFNAME" not in world.thread_environment(1)
