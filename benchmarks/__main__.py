"""``python -m benchmarks``: every benchmark, one after another, each in a process of its own."""

import subprocess
import sys

NAMES = (
    "startup",
    "wrong_commands",
    "runs_listing",
    "pages",
    "sweep_store",
    "sweep_search",
    "slurm",
    "step_overhead",
    "step_time",
    "packed_rows",
    "long_text_memory",
    "loss_head",
    "data_pipeline",
    "image_audio_loading",
    "data_parallel_bytes",
    "data_parallel_time",
    "axes_bytes",
    "axes_memory",
    "axes_time",
    "context_memory",
    "context_time",
    "expert_bytes",
    "pipeline_bubble",
    "deepspeed_time",
    "zero_bytes",
    "contrastive_loss",
    "building_memory",
    "trainer_time",
    "fine_tuning_time",
    "fine_tuning_memory",
    "checkpoint_save",
    "thread_waits",
    "plan_accuracy",
    "plan_cpu",
)

for name in NAMES:
    print(f"== {name}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
