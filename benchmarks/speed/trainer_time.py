"""Step time of data parallelism on two CPU processes, over Hugging Face Trainer with accelerate.

``ddp`` against the Trainer under DistributedDataParallel, ``fsdp`` against it under accelerate's FSDP2: the same model,
the same number of samples of the same length a step, AdamW (fused), clipping, fp32, no logging and no saving, in blocks
that alternate within the same processes. This project's runs have their CSV on. The Trainer is given what makes it
fast: no search for unused parameters, no exchange of token counts, samples that are in memory already.

accelerate chooses FSDP on accelerators only and would quietly wrap a model on the CPU in DistributedDataParallel; here
its state is told the choice (:func:`choose_fsdp`), and everything after that is its own code.

``pip install 'mgpu_pipe[benchmarks]'``, then ``python -m benchmarks.speed.trainer_time``.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

from benchmarks.speed.data_parallel_time import BATCH, STEPS, WARM_UP, WORLD, compare


def trainer_block(config: Any, prepared: Any, strategy: str) -> list[float]:
    import transformers

    from mgpu_pipe.models.build import build_meta, materialise

    class Clock(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.marks = [time.perf_counter()]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.marks.append(time.perf_counter())

    clock = Clock()
    fsdp: Any = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH // WORLD,
            learning_rate=config.optimizer.lr,
            weight_decay=0.1,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            ddp_find_unused_parameters=False,
            ddp_broadcast_buffers=False,
            average_tokens_across_devices=False,
            **(fsdp if strategy == "fsdp" else {}),
        )
        trainer = transformers.Trainer(
            model=materialise(build_meta(config.model), config.seed, "cpu"),
            args=arguments,
            train_dataset=samples(config, prepared),
            callbacks=[clock],
        )
        if strategy == "fsdp":
            choose_fsdp(trainer)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    forget()
    return [after - before for before, after in zip(clock.marks, clock.marks[1:], strict=False)][WARM_UP:]


def samples(config: Any, prepared: Any) -> list[dict[str, Any]]:
    """The run's samples, of all processes, in memory."""
    from mgpu_pipe.data.loader import train_step_batches
    from mgpu_pipe.topology import BatchPlan

    step_batches = train_step_batches(
        config, prepared, BatchPlan.resolve(config.data, 1), 0, start_sample=0, max_steps=STEPS
    )
    rows = [row for step_batch in step_batches for batch in step_batch.micro_batches for row in batch["input_ids"]]
    return [{"input_ids": row, "labels": row} for row in rows]


def choose_fsdp(trainer: Any) -> None:
    """What accelerate's state holds where it has chosen FSDP."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


def forget() -> None:
    """Let the next Trainer choose anew, in the same process group."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


if __name__ == "__main__":
    compare(
        "trainer_time",
        "Step time on two CPU processes, over Hugging Face Trainer with accelerate",
        trainer_block,
        {"ddp": "Trainer, DistributedDataParallel", "fsdp": "Trainer, accelerate's FSDP2"},
    )
