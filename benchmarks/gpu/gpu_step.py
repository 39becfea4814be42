"""Training steps on one GPU: model FLOPs utilisation over the GPU's peak, beside peers on the same samples.

Rows of 4,096 random tokens, bf16 with weights, gradients and AdamW in fp32, eight rows a step, the same micro-batches.
Peers train one document a row, as this project's first run does: Hugging Face Trainer as it comes, with torch.compile,
and with Liger's kernels (both together fail in liger-kernel 0.8.5 under torch 2.11), and a torch loop written by hand
around the compiled model. Each case is a program of its own; the median of the steps after the first four is taken, of
peers the mean of the last ones between two waits for the GPU.

``python -m benchmarks.gpu.gpu_step`` on a machine with a GPU; it needs liger-kernel for its row.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.support import finish
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.runs.metrics_file import read_metrics

STEPS, WARM_UP = 12, 4
BASE = (
    "model=llama32_1b",
    "data=synthetic",
    "data.seq_len=4096",
    "data.global_batch_size=8",
    "data.micro_batch_size=2",
    "data.validation_fraction=0",
    "precision=bf16",
    f"trainer.max_steps={STEPS}",
    "trainer.devices=1",
    "checkpoint=none",
    "logger=none",
)
WHOLE = (
    "data.packing=none",
    "data.synthetic.sigma=0",
    "data.synthetic.mean_length=4096",
    "data.synthetic.num_documents=120",
)
"""One document a row, and no padding."""
PACKED = ("data.synthetic.mean_length=1200", "data.synthetic.num_documents=450")
THREE_BILLION = (
    "model.name=llama32_3b",
    "model.config.hidden_size=3072",
    "model.config.num_hidden_layers=28",
    "model.config.num_attention_heads=24",
    "model.config.head_dim=128",
    "strategy.activation_checkpointing=full",
    "data.micro_batch_size=1",
)
OURS = {
    "mgpu_pipe": WHOLE,
    "mgpu_pipe, packed documents": PACKED,
    "mgpu_pipe, packed, fsdp of one": (*PACKED, "strategy=fsdp"),
    "mgpu_pipe, packed, micro-batches of 4": (*PACKED, "data.micro_batch_size=4"),
    "mgpu_pipe, packed, micro-batches of 4, FlashAttention 3": (
        *PACKED,
        "data.micro_batch_size=4",
        "model.flash_attention=fa3",
    ),
    "mgpu_pipe, packed, fp8": (*PACKED, "precision=fp8"),
    "mgpu_pipe, packed, 3B": (*PACKED, *THREE_BILLION),
    "mgpu_pipe, LoRA of 8B": (*WHOLE, "model=llama3_8b", "peft=lora", "data.micro_batch_size=1"),
    "mgpu_pipe, LoRA of 8B, Liger": (
        *WHOLE,
        "model=llama3_8b",
        "peft=lora",
        "data.micro_batch_size=1",
        "model.kernels=liger",
    ),
}
PEERS = ("Hugging Face Trainer", "Trainer, compiled", "Trainer, Liger", "compiled torch loop")


def ours(overrides: tuple[str, ...]) -> dict[str, Any]:
    """Seconds a step, utilisation and GiB of a run of the program."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "mgpu_pipe", *BASE, *overrides, f"run.dir={run}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        metrics = read_metrics(run / "metrics.csv")
    seconds = metrics["throughput/step_s"]
    return {
        "seconds": statistics.median(seconds[WARM_UP:]),
        "utilisation": statistics.median(metrics["throughput/mfu"][WARM_UP:]),
        "gib": max(metrics["memory/peak_gib"]),
        "loss": metrics["train/loss"][0],
    }


def configuration() -> RunConfig:
    return compose([*BASE, *WHOLE])[0]


def rows(config: RunConfig) -> Iterator[Any]:
    """The micro-batches of the steps, input ids of shape (rows, tokens)."""
    import torch

    from mgpu_pipe.models.build import model_config

    vocabulary = model_config(config.model).vocab_size
    generator = torch.Generator().manual_seed(0)
    shape = int(config.data.micro_batch_size), config.data.seq_len
    for _ in range(STEPS * config.data.global_batch_size // shape[0]):
        yield torch.randint(vocabulary, shape, generator=generator)


def plain_model(config: RunConfig) -> Any:
    """transformers' own, with fp32 weights on the GPU."""
    import torch
    import transformers

    from mgpu_pipe.models.build import model_config

    settings = model_config(config.model)
    settings.use_cache = False
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).train()


class Clock:
    """Time between the end of the warm-up and the last step, each waited for."""

    def __init__(self) -> None:
        self.steps, self.begun, self.seconds = 0, 0.0, 0.0

    def step(self) -> None:
        import torch

        self.steps += 1
        if self.steps in (WARM_UP, STEPS):
            torch.cuda.synchronize()
            if self.steps == WARM_UP:
                self.begun = time.perf_counter()
            else:
                self.seconds = (time.perf_counter() - self.begun) / (STEPS - WARM_UP)


def trainer(compiled: bool = False, liger: bool = False) -> Clock:
    import transformers

    class Marks(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    config, clock = configuration(), Clock()
    micro_batch = int(config.data.micro_batch_size)
    samples = [{"input_ids": row, "labels": row} for batch in rows(config) for row in batch]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=config.data.global_batch_size // micro_batch,
            learning_rate=config.optimizer.lr,
            weight_decay=0.1,
            max_grad_norm=1.0,
            bf16=True,
            optim="adamw_torch_fused",
            torch_compile=compiled,
            use_liger_kernel=liger,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        transformers.Trainer(
            model=plain_model(config), args=arguments, train_dataset=samples, callbacks=[Marks()]
        ).train()
    return clock


def loop() -> Clock:
    import torch

    config, clock = configuration(), Clock()
    model = plain_model(config)
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, weight_decay=0.1, fused=True)
    accumulated = config.data.global_batch_size // int(config.data.micro_batch_size)
    for number, batch in enumerate(rows(config), start=1):
        ids = batch.to("cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(input_ids=ids, labels=ids).loss
        (loss / accumulated).backward()
        if number % accumulated == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            clock.step()
    return clock


def peer(name: str) -> dict[str, Any]:
    import torch

    cases: dict[str, Callable[[], Clock]] = dict(
        zip(PEERS, (trainer, partial(trainer, compiled=True), partial(trainer, liger=True), loop), strict=True)
    )
    clock = cases[name]()
    return {"seconds": clock.seconds, "gib": torch.cuda.max_memory_allocated() / (1 << 30)}


def ceiling() -> float:
    """FLOP/s of bf16 matrix products of 8,192 rows and columns."""
    import torch

    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for count in (5, 30):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            left @ right
        torch.cuda.synchronize()
    return 2 * 8192**3 * count / (time.perf_counter() - begun)


def measured(name: str) -> dict[str, Any]:
    """A case in a program of its own; an empty row says that it failed, and why."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.gpu_step", "--case", name], stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"failed": done.returncode}


def main() -> None:
    if sys.argv[1:2] == ["--case"]:
        name = sys.argv[2]
        print(json.dumps(ours(OURS[name]) if name in OURS else peer(name)))
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit("error: this measures a GPU, and torch can use none here")
    top = ceiling()
    tokens = 8 * 4096
    found = {}
    with suppress(KeyboardInterrupt):  # what was measured until then is told
        for name in sys.argv[1:] or (*list(OURS)[:2], *PEERS, *list(OURS)[2:]):
            found[name] = measured(name)
            print(name, found[name], flush=True)
    first = found.get("mgpu_pipe", {})
    table = []
    for name, row in found.items():
        if "failed" in row:
            continue
        # The same model and the same rows: utilisation goes as the time does.
        share = row.get("utilisation") or first.get("utilisation", 0.0) * first.get("seconds", 0.0) / row["seconds"]
        table.append([name, row["seconds"], tokens / row["seconds"], 100 * share, row["gib"]])
    notes = (
        f"llama32_1b where nothing else is said; utilisation of the published dense bf16 peak of "
        f"{torch.cuda.get_device_name()}, whose own matrix products reach {top / 1e12:.0f} TFLOP/s."
    )
    columns = ["case", "seconds a step", "tokens a second", "utilisation, %", "peak GiB"]
    finish("gpu_step", "A training step of 32,768 tokens on one GPU", columns, table, notes)


if __name__ == "__main__":
    main()
