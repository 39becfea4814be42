"""``python -m benchmarks``: every benchmark, one after another, each in a process of its own."""

import subprocess
import sys

NAMES = ("startup", "step_overhead", "step_time", "data_pipeline")

for name in NAMES:
    print(f"== {name}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
