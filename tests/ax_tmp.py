import sys, time
from dataclasses import replace
from tests.support.training import *
from tests.support.processes import run_processes
from mgpu_pipe.topology import ParallelDims
def go(case, dims):
    return trained(case, dims)
if __name__ == "__main__":
    spec = dict(kv.split("=") for kv in sys.argv[1:])
    sizes = {k: int(v) for k, v in spec.items() if k in ("tp","pp","cp","ep","dp_shard","dp_replicate")}
    dims = ParallelDims(**sizes)
    opts = {}
    if spec.get("sp"): opts["sequence_parallel"] = True
    if spec.get("method"): opts["context_method"] = spec["method"]
    for model in spec.get("models", "llama,gpt2,qwen3,mixtral").split(","):
        case = Case(model=model, steps=3, samples=int(spec.get("samples", 8)), micro_batches=int(spec.get("mb", 4 if dims.pp > 1 else 1)), schedule=spec.get("schedule", "1f1b"), layers=int(spec.get("layers", 4 if dims.pp>2 else 0)), max_norm=0.3 if spec.get("clip") else None, checkpointing=spec.get("ac","none"), options=opts)
        t = time.time()
        try:
            r = run_processes(dims.world_size, go, case, dims, timeout_s=150.0)
            torch.set_num_threads(1)
            print(spec, model, worst_error(r, plain(case)), f"{time.time()-t:.0f}s", flush=True)
        except AssertionError as e:
            import traceback; print(spec, model, "FAIL", traceback.format_exc()[-5000:], flush=True)
