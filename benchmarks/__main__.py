"""``python -m benchmarks``: every benchmark, one after another, each in a process of its own."""

import subprocess
import sys

NAMES = {
    "commands": ("startup", "wrong_commands", "runs_listing", "pages", "sweep_store", "slurm"),
    "speed": (
        *("step_overhead", "step_time", "packed_rows", "loss_head", "data_pipeline", "image_audio_loading"),
        *("data_parallel_time", "axes_time", "context_time", "pipeline_bubble", "deepspeed_time", "trainer_time"),
        *("fine_tuning_time", "checkpoint_save", "thread_waits", "generate_time", "embeddings"),
    ),
    "memory": (
        *("long_text_memory", "axes_memory", "context_memory", "contrastive_loss", "building_memory"),
        "fine_tuning_memory",
    ),
    "traffic": ("data_parallel_bytes", "axes_bytes", "expert_bytes", "zero_bytes"),
    "accuracy": ("sweep_search", "plan_accuracy", "plan_cpu", "encoder_parity"),
}

for folder, names in NAMES.items():
    for name in names:
        print(f"== {folder}.{name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{folder}.{name}"], check=True)
