"""Whole runs on a GPU against those of one CPU process; dry, the same commands on the CPU, told and not compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.conftest import Programs, sampled
from tests.runs.support import overrides, same
from tests.support.command import column, launched, metrics, run_folder, start, wait_for_step

STRATEGIES = {
    "single": (),
    "ddp": (),
    "fsdp": (),
    "fsdp, offloaded": ("strategy=fsdp", "strategy.offload=cpu"),
    "zero1": (),
    "zero2": (),
    "zero3": (),
    "zero3_cpu": (),
    "unpacked": ("data.packing=none",),
    "recomputed": ("strategy.activation_checkpointing=selective",),
    "compiled": ("model.compile=true",),
    "liger": ("model.kernels=liger",),
    "mixtral": ("model=mixtral_tiny", "trainer.deterministic=true"),
}
SHORT = {
    "bf16": ("precision=bf16",),
    "bf16, compiled": ("precision=bf16", "model.compile=true"),
    "bf16, fsdp": ("precision=bf16", "strategy=fsdp"),
    "bf16, zero2": ("precision=bf16", "strategy=zero2"),
    "bf16, zero3": ("precision=bf16", "strategy=zero3"),
    "bf16, unpacked": ("precision=bf16", "data.packing=none"),
    "bf16, liger": ("precision=bf16", "model.kernels=liger"),
    "bf16, FlashAttention 3": ("precision=bf16", "model.flash_attention=fa3"),
    "fp16, fsdp": ("precision=fp16", "strategy=fsdp"),
    "fp8": ("precision=fp8",),
}
LIGER = "model.kernels=liger: they run on GPUs"
ON_GPUS_ALONE = {
    "fsdp, offloaded": "strategy.offload=cpu: on the CPU",
    "fp8": "precision.name=fp8: float8 needs a GPU",
    "liger": LIGER,
    "bf16, liger": LIGER,
    "bf16, FlashAttention 3": "model.flash_attention=fa3: the package flash-attn-3 is not installed",
}
"""What is refused on the CPU, and how."""
NEEDS = {
    "liger": ("liger_kernel", "liger-kernel"),
    "bf16, liger": ("liger_kernel", "liger-kernel"),
    "bf16, FlashAttention 3": ("flash_attn_interface", "flash-attn-3"),
    "fp8": ("torchao", "torchao"),
}
"""Modules that runs on a GPU need, and their packages."""
REPEATED = {
    "fp32": ("precision=fp32",),
    "bf16, compiled": ("precision=bf16", "model.compile=true"),
    "bf16, fsdp": ("precision=bf16", "strategy=fsdp"),
    "bf16, mixtral": ("precision=bf16", "model=mixtral_tiny"),
    "bf16, zero3": ("precision=bf16", "strategy=zero3"),
}


def needs(name: str) -> None:
    """Skip a run on a GPU without its package."""
    if name in NEEDS:
        module, package = NEEDS[name]
        pytest.importorskip(module, reason=f"{name}: pip install {package}")


@pytest.mark.parametrize("name", sampled(STRATEGIES, "fsdp", "fsdp, offloaded"))
def test_a_run_in_fp32_is_that_of_one_cpu_process(name: str, programs: Programs, corpus: Path) -> None:
    chosen = STRATEGIES[name] or (f"strategy={name}",)
    on_cpu = tuple(entry for entry in chosen if entry.startswith(("data.", "model=")))
    if programs.dry and name in ON_GPUS_ALONE:
        assert ON_GPUS_ALONE[name] in programs.refused(*overrides(corpus, *chosen))
        return
    needs(name)
    programs.hold(overrides(corpus, *chosen), overrides(corpus, *on_cpu), same)


@pytest.mark.parametrize("name", sampled(SHORT, "fp8"))
def test_shorter_types_stay_close_to_fp32(name: str, programs: Programs, corpus: Path) -> None:
    def close(mine: Path, truth: Path) -> None:
        for metric, bound in (("train/loss", 2e-3), ("train/grad_norm", 3e-2 if name == "fp8" else 1e-2)):
            found, wanted = column(mine, metric), column(truth, metric)
            assert max(abs(found[step] / wanted[step] - 1) for step in wanted) < bound, metric

    on_cpu = tuple(entry for entry in SHORT[name] if entry.startswith("data."))
    if programs.dry and name in ON_GPUS_ALONE:
        assert ON_GPUS_ALONE[name] in programs.refused(*overrides(corpus, *SHORT[name]))
        return
    needs(name)
    programs.hold(overrides(corpus, *SHORT[name]), overrides(corpus, *on_cpu), close)


@pytest.mark.parametrize("name", sampled(REPEATED))
def test_a_killed_run_goes_on_bit_for_bit(name: str, programs: Programs, corpus: Path) -> None:
    cache, folder = programs.cache, programs.folder / "killed"
    steps, every, seen = (12, 2, 4) if programs.dry else (40, 5, 12)
    wanted = overrides(
        corpus,
        f"trainer.accelerator={'cpu' if programs.dry else 'gpu'}",
        "trainer.deterministic=true",
        f"checkpoint.every_n_steps={every}",
        f"trainer.max_steps={steps}",
        *REPEATED[name],
    )
    begin = launched if programs.dry else start  # CUDA does not survive a fork

    def to_its_end(*words: str) -> Path:
        process = begin(cache, programs.folder, *words)
        out, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
        return run_folder(out)

    def rows(of: Path) -> list[tuple[str, ...]]:
        return [
            tuple(row[name] for name in ("step", "train/loss", "train/grad_norm", "val/loss")) for row in metrics(of)
        ]

    whole = to_its_end(*wanted)
    killed = (*wanted, f"run.dir={folder}", "checkpoint.resume=auto")
    process = begin(cache, programs.folder, *killed)
    wait_for_step(folder, seen, process)
    process.kill()
    process.communicate()
    assert rows(to_its_end(*killed)) == rows(whole)
