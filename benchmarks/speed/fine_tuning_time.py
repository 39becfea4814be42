"""The time of a step of LoRA, preferences and distillation in one process, over hand-written torch loops.

LoRA over plain peft. Preferences over two passes of the plain loss: the chosen conversations, then the rejected ones,
each with its backward pass. Distillation over a forward pass of the teacher and a step of the student without it. Each
pair has the same model and step batches, in blocks that alternate within one process; this project's runs have their
CSV on. ``python -m benchmarks.speed.fine_tuning_time [BLOCKS STEPS]``.

glibc keeps what is freed, for both. Else it gives large buffers back to the kernel, and a step waits for new pages: on
a virtual machine for up to a sixth of it, as its host has them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.speed.step_time import framework_block, plain_block, plain_loss
from benchmarks.support import KEEPING, finish
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.weights.pretrained import load_pretrained

BLOCKS, STEPS, WARM_UP = 3, 14, 3
COMMON = ("model=llama_small", "checkpoint=none", "data.validation_fraction=0", "logger=none", "trainer.progress=off")
TEACHER = {"hidden_size": 512, "intermediate_size": 1536}
PAIRS, ANSWER_TOKENS = 400, 100


def with_peft(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=linear))


def two_passes(model: Any, batch: Mapping[str, torch.Tensor]) -> list[Callable[[], torch.Tensor]]:
    """The plain loss of the chosen conversations and of the rejected ones, each in rows of its own."""
    starts = (batch["position_ids"] == 0).int()
    document = starts.cumsum(1)
    passes: list[Callable[[], torch.Tensor]] = []
    for side in (1, 2):
        rows = [document[row] == side for row in range(len(document))]
        length = max(int(row.sum()) for row in rows)
        half = {}
        for name, padding in (("input_ids", 0), ("labels", -100), ("position_ids", 0)):
            half[name] = torch.full((len(rows), length), padding)
            for index, row in enumerate(rows):
                half[name][index, : int(row.sum())] = batch[name][index][row]
        half["position_ids"] = torch.arange(length).expand(len(rows), length)
        passes.append(partial(plain_loss, model, half))
    return passes


def taught(model: Any, batch: Mapping[str, torch.Tensor], teacher: Any) -> list[Callable[[], torch.Tensor]]:
    """The plain loss, after a forward pass of the teacher."""

    def loss() -> torch.Tensor:
        with torch.no_grad():
            teacher(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        return plain_loss(model, batch)

    return [loss]


def preferences(folder: Path) -> Path:
    """Pairs of answers of about :data:`ANSWER_TOKENS` tokens, from this Python's own sources."""
    words = Path(argparse_source()).read_text(encoding="utf-8").split()
    size = ANSWER_TOKENS // 4
    file = folder / "pairs.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for pair in range(PAIRS):
            at = pair * 7 % (len(words) - 3 * size)
            prompt, chosen, rejected = (" ".join(words[at + n * size : at + (n + 1) * size]) for n in range(3))
            out.write(json.dumps({"prompt": f"{pair} {prompt}", "chosen": chosen, "rejected": rejected}) + "\n")
    return file


def argparse_source() -> str:
    import argparse

    return str(argparse.__file__)


def teacher_folder(folder: Path) -> Path:
    config, _ = compose(["model=llama_small"])
    config.model.config = {**config.model.config, **TEACHER}
    materialise(build_meta(config.model), 7, "cpu").save_pretrained(folder / "teacher")
    return folder / "teacher"


def main() -> None:
    blocks, steps = (int(word) for word in sys.argv[1:]) if sys.argv[1:] else (BLOCKS, STEPS)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        pairs, folder = preferences(Path(name)), teacher_folder(Path(name))
        teacher = load_pretrained(compose([f"model.path={folder}", "model=hf"])[0].model, "cpu").eval()
        dpo = ("objective=dpo", "data=preferences_jsonl", f"data.paths=[{pairs}]", "data.chat_template=plain")
        cases: list[tuple[str, tuple[str, ...], str, dict[str, Any]]] = [
            ("LoRA", ("peft=lora", "data=synthetic"), "peft", {"adapted": with_peft}),
            ("preferences", (*dpo, "data.seq_len=256"), "two passes of the plain loss", {"losses": two_passes}),
            (
                "distillation",
                ("objective=distill", f"objective.teacher={folder}", "data=synthetic"),
                "teacher's forward pass and student's step",
                {"losses": partial(taught, teacher=teacher)},
            ),
        ]
        for what, overrides, peer, options in cases:
            sizes = (f"trainer.max_steps={steps}", "data.global_batch_size=8", "scheduler=constant")
            config, _ = compose([*COMMON, *sizes, *overrides])
            prepared = prepare(config)
            ours: list[float] = []
            plain: list[float] = []
            for _ in range(blocks):
                plain += plain_block(config, prepared, **options)
                ours += framework_block(config, prepared)
            a, b = statistics.median(ours), statistics.median(plain)
            rows.append([what, f"8 x {config.data.seq_len}", a * 1e3, peer, b * 1e3, a / b])
    out = finish(
        "fine_tuning_time",
        "Fine-tuning step of llama_small, one process, fp32, over hand-written torch loops",
        ["objective", "batch", "mgpu_pipe ms", "peer", "peer ms", "ratio"],
        rows,
        f"Medians of {blocks * (steps - WARM_UP)} steps each, blocks alternating; a teacher of four times the weights; "
        "glibc keeps what is freed.",
    )
    dist.destroy_process_group()
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    if not os.environ.keys() >= KEEPING.keys():
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.speed.fine_tuning_time", *sys.argv[1:]],
            os.environ | KEEPING,
        )
    main()
