"""The time of answers and the memory of exports, over transformers and over fewer processes.

Greedy answers of one model: one prompt over transformers' ``generate``; a file of prompts over transformers' padded
batches in the file's order, and in two processes over one; under tensor parallelism with the cache over whole texts.
Each process has one thread. Exports: the peak of torch's memory over the largest tensor that is written.
``python -m benchmarks.speed.generate_time [one] [batch] [tp] [export]``.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.processes import run_group
from benchmarks.support import finish

BLOCKS, BATCH_BLOCKS, TP_BLOCKS = 3, 2, 1
WARM_UP = 8
"""Tokens of each kind of text before the timed ones."""
MODEL = ("model=llama_small", "model.config.vocab_size=304")
PROMPTS, SHORTEST, LONGEST, BATCH_SIZE, NEW_TOKENS = 64, 10, 500, 16, 32
BIG = {"vocab_size": 1_000_000, "tie_word_embeddings": True}
"""A table of 128 MB in bf16, next to which the slices of 8 MB that are read count little."""
TEXT = 512
"""Tokens of the texts under tensor parallelism and of single answers."""


def write_model(folder: Path) -> None:
    """A model whose answers never end by themselves, its tokenizer, and a file of prompts of uneven lengths."""
    import torch

    from mgpu_pipe.config.hydra.compose import compose
    from mgpu_pipe.models.build import build_meta, materialise
    from tests.inference.support import WORDS, write_tokenizer
    from tests.models.tiny import write_folder

    config, _ = compose(list(MODEL))
    model: Any = materialise(build_meta(config.model), 1, "cpu").eval()
    with torch.no_grad():
        model.lm_head.weight[0] = 0  # the end token's logit is 0, and never the largest
    write_folder(model, folder)
    write_tokenizer(folder)
    lengths = torch.randint(SHORTEST, LONGEST, (PROMPTS,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [{"prompt": " ".join((WORDS * LONGEST)[at : at + length])} for at, length in enumerate(lengths)]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def medians(*works: Callable[[], Any], blocks: int = BLOCKS) -> list[float]:
    """Seconds of each work, in blocks that alternate; every work ran before."""
    seconds = [[timed(work) for work in works] for _ in range(blocks)]
    return [statistics.median(column) for column in zip(*seconds, strict=True)]


def opened(folder: Path) -> tuple[Any, Any, list[str]]:
    """This program's run, transformers' model, and the prompts."""
    import torch
    from transformers import AutoModelForCausalLM

    from mgpu_pipe.inference.open import load_run

    torch.set_num_threads(1)
    prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    theirs = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    return load_run(folder), theirs, prompts


def one_answer(folder: Path) -> list[float]:
    from mgpu_pipe.inference.generation import generate_text

    run, theirs, prompts = opened(folder)
    tokenizer = run.tokenizer()
    inputs = tokenizer(prompts[0], return_tensors="pt")
    new = TEXT - inputs["input_ids"].shape[1] % TEXT

    def their_answer() -> Any:
        return theirs.generate(**inputs, max_new_tokens=new, do_sample=False, eos_token_id=0, pad_token_id=0)

    def own_answer() -> list[str]:
        return generate_text(run.model, tokenizer, prompts[:1], max_new_tokens=new, temperature=0)

    answer = tokenizer.decode(their_answer()[0, inputs["input_ids"].shape[1] :])
    assert own_answer()[0].strip() == answer.strip()
    return medians(own_answer, their_answer)


def own_batches(folder: Path, rank: int = 0, processes: int = 1, blocks: int = BATCH_BLOCKS) -> float:
    """Seconds of a job; all its processes begin together."""
    import torch
    import torch.distributed as dist

    from mgpu_pipe.inference.batch.answer import answer_prompts
    from mgpu_pipe.inference.batch.job_folder import Share
    from mgpu_pipe.inference.batch.settings import AnswerSettings
    from mgpu_pipe.inference.open import load_run

    torch.set_num_threads(1)
    run, prompts = load_run(folder), folder / "prompts.jsonl"

    def job(number: int) -> None:
        out = folder / f"answers-{processes}-{number}.jsonl"
        settings = AnswerSettings(
            *(folder, prompts, out, BATCH_SIZE, False, None, "cpu", NEW_TOKENS, 0.0, None, None, 0, True, "refuse")
        )
        if rank == 0:
            settings.folder().root.mkdir()
            settings.folder().begin({})
        if processes > 1:
            dist.barrier()
        answer_prompts(settings, run, Share(rank, processes))

    return statistics.median([timed(partial(job, number)) for number in range(blocks + 1)][1:])


def batches_of_rank(folder: Path) -> float:
    import torch.distributed as dist

    return own_batches(folder, dist.get_rank(), dist.get_world_size())


def their_batches(folder: Path) -> float:
    run, theirs, prompts = opened(folder)
    tokenizer = run.tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"

    def batches() -> None:
        for first in range(0, len(prompts), BATCH_SIZE):
            inputs = tokenizer(prompts[first : first + BATCH_SIZE], return_tensors="pt", padding=True)
            theirs.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=0, pad_token_id=0)

    batches()
    return medians(batches, blocks=BATCH_BLOCKS)[0]


def tensor_parallel(folder: Path) -> list[float]:
    """Seconds of a text with the cache, and of the same text recomputed whole for each token."""
    import torch

    from mgpu_pipe.config.hydra.compose import compose
    from mgpu_pipe.inference.find_model import find_model
    from mgpu_pipe.inference.generation import continue_batch, generation_mode, load_tokenizer
    from mgpu_pipe.inference.parallel_run import evaluation_config, open_parallel
    from mgpu_pipe.inference.sampling import Sampling

    source = find_model(folder)
    config, _ = compose([*MODEL, "strategy=tp", "trainer.devices=2", "precision=fp32"])
    parallel = open_parallel(source, evaluation_config(source, config), torch.device("cpu"))
    tokenizer, prompt = load_tokenizer(folder), [5, 6, 7, 8]

    def text(use_cache: bool, tokens: int = TEXT) -> str:
        sampling = Sampling(tokens - len(prompt), 0.0, None, None)
        with generation_mode(parallel.model):
            [answer] = continue_batch(
                *(parallel.model, tokenizer, [prompt], sampling, [0]), is_answer=False, use_cache=use_cache
            )
        assert answer.num_tokens == sampling.max_new_tokens
        return answer.text

    text(True, WARM_UP), text(False, WARM_UP)
    return medians(lambda: text(True), lambda: text(False), blocks=TP_BLOCKS)


def export_peaks(folder: Path) -> list[list[Any]]:
    """Peak bytes of an export and bytes of the largest tensor that is written, by type."""
    import torch

    from mgpu_pipe.inference.model_folder import write_model_folder
    from mgpu_pipe.inference.open import open_model
    from mgpu_pipe.parallel.device_memory import AllocationWatch
    from tests.inference.support import write_run, write_texts

    write_run(folder / "run", "llama", write_texts(folder / "texts", 4), folder / "cache", **BIG)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        stored, out = open_model(folder / "run"), folder / str(dtype)
        out.mkdir()
        largest = max(parameter.numel() for parameter in stored.model.parameters()) * dtype.itemsize
        with AllocationWatch() as watch:
            write_model_folder(stored.model, stored.read, out, dtype)
        name = f"export {str(dtype).removeprefix('torch.')}: peak MB over the largest tensor's"
        rows.append([name, watch.peak / 1e6, largest / 1e6, watch.peak / largest, "at most 1.1"])
    return rows


def main() -> None:
    chosen = sys.argv[1:] or ["one", "batch", "tp", "export"]
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_model(folder)
        if "one" in chosen:
            [(own, theirs)] = run_group(1, one_answer, folder)
            rows.append(["one prompt: transformers' s over own", theirs, own, theirs / own, "at least 1.0"])
        if "batch" in chosen:
            [own], [theirs] = run_group(1, batches_of_rank, folder), run_group(1, their_batches, folder)
            two = max(run_group(2, batches_of_rank, folder))
            rows.append(["file: padded batches' s over own", theirs, own, theirs / own, "at least 1.5"])
            rows.append(["file: one process' s over two's", own, two, own / two, "at least 1.8"])
        if "tp" in chosen:
            cached, whole = run_group(2, tensor_parallel, folder)[0]
            rows.append([f"tp 2, {TEXT} tokens: recomputed s over cached", whole, cached, whole / cached, "at least 5"])
        if "export" in chosen:
            rows += export_peaks(Path(scratch))
    out = finish(
        "generate_time",
        "Greedy answers of llama_small in fp32, and the memory of exports",
        ["what", "first", "second", "ratio", "wanted"],
        rows,
        f"Medians of {BLOCKS} blocks ({BATCH_BLOCKS} of a file, {TP_BLOCKS} under tp) after a warm-up. "
        f"{PROMPTS} prompts of {SHORTEST} to {LONGEST} words, batches of {BATCH_SIZE}, {NEW_TOKENS} new tokens each.",
    )
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
