"""Text embeddings over sentence-transformers: step, memory of a large batch, ``encode``; and towers that are dealt.

- step, peak: seconds and memory of a step on two processes over ``CachedMultipleNegativesRankingLoss`` with
  ``gather_across_devices=True`` in DistributedDataParallel. Both have the same weights, token ids, fused AdamW and
  clipping, and blocks alternate in the same processes. Their mini-batch counts texts; a micro-batch counts pairs.
- batch: peak memory of a step on one process above the loaded model, over that of a batch of one micro-batch.
- encode: texts a second of two processes after their start, over ``SentenceTransformer.encode`` with a pool of two.
- towers: work of the busiest of four ranks over the mean, and bytes sent over those of features and gradients.

Each process has one thread. Peaks are bytes of tensors, from the building of the model on.
``python -m benchmarks.speed.embeddings [step] [peak] [batch] [encode] [towers]``; each writes a file.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import run_group
from benchmarks.support import finish

WORLD = 2
SIZES: dict[str, Any] = {
    **{"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
WORDS = [f"word{number}" for number in range(4000)]


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts.

    Attributes:
        batch: pairs of a step on two processes.
        texts: texts of a mini-batch of sentence-transformers.
        pairs: pairs of a micro-batch, of each row.
        blocks: blocks of each side, each of ``steps`` steps, the first ``warm_up`` of which are left out.
        large, micro: pairs of the large batch and of its micro-batches.
        files: texts to encode.
    """

    batch: int = 256
    texts: int = 32
    pairs: tuple[int, ...] = (16, 32)
    seq_len: int = 64
    blocks: int = 2
    steps: int = 5
    warm_up: int = 1
    large: int = 8192
    micro: int = 32
    files: int = 2000
    model: tuple[tuple[str, Any], ...] = tuple(SIZES.items())


SHORTEST, LONGEST, MAX_TOKENS, ENCODE_BATCH = 5, 400, 512, 32


def write_model(folder: Path, sizes: Sizes) -> Path:
    """A BERT as sentence-transformers saves it, whose words are tokens."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    from mgpu_pipe.config.objective import description
    from mgpu_pipe.data.sources.compared_texts import EmbeddingPairsConfig

    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(words), max_position_embeddings=MAX_TOKENS, **dict(sizes.model))
    BertModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    keys: Any = description("text_embedding").keys()
    files = keys.folder_files(EmbeddingPairsConfig(seq_len=MAX_TOKENS), config.hidden_size)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_pairs(file: Path, pairs: int, seq_len: int) -> Path:
    """Pairs of texts that fill their rows."""
    draw = random.Random(1)
    rows = [{key: " ".join(draw.choices(WORDS, k=seq_len)) for key in ("query", "positive")} for _ in range(pairs)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


def configured(folder: Path, batch: int, micro: int, devices: int, steps: int, seq_len: int) -> Any:
    from mgpu_pipe.config.hydra.compose import compose

    config, _ = compose(
        [
            *("model=hf", f"model.path={folder / 'model'}", "objective=text_embedding", "data=embedding_pairs"),
            *(f"data.paths=[{folder / 'pairs.jsonl'}]", f"data.seq_len={seq_len}", f"trainer.devices={devices}"),
            *(f"data.global_batch_size={batch}", f"data.micro_batch_size={micro}", f"trainer.max_steps={steps}"),
            *("data.validation_fraction=0", "checkpoint=none", "logger=none", "trainer.progress=off"),
            *(f"strategy={'ddp' if devices > 1 else 'single'}", "trainer.accelerator=cpu"),
        ]
    )
    return config


def own_block(config: Any) -> tuple[list[float], list[float]]:
    """Seconds and losses of all steps."""
    from mgpu_pipe.config.freeze import freeze
    from mgpu_pipe.config.paths import RunPaths
    from mgpu_pipe.data.prepare_data import prepare
    from mgpu_pipe.runs.metrics_file import read_metrics
    from mgpu_pipe.training.train import train

    prepared = prepare(config)
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        freeze(config, paths.config)
        train(config, paths, prepared)
        if not paths.metrics.exists():  # the first rank writes it
            return [], []
        metrics = read_metrics(paths.metrics)
        return metrics["throughput/step_s"], metrics["train/loss"]


def their_block(config: Any, texts: int) -> tuple[list[float], list[float]]:
    """:func:`own_block` of sentence-transformers' loss in DistributedDataParallel."""
    import torch
    import torch.distributed as dist
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    from mgpu_pipe.data.loader import train_step_batches
    from mgpu_pipe.data.prepare_data import prepare
    from mgpu_pipe.topology import BatchPlan

    plan, steps = BatchPlan.resolve(config.data, WORLD), config.trainer.max_steps
    model = SentenceTransformer(config.model.path, device="cpu").train()
    loss_of = CachedMultipleNegativesRankingLoss(model, mini_batch_size=texts, gather_across_devices=True)
    encoder: Any = model[0]
    for parameter in encoder.model.pooler.parameters():
        parameter.requires_grad_(False)  # no vector reads it
    loss_of.model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=config.optimizer.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seconds, losses = [], []
    mark = time.perf_counter()
    for batch in train_step_batches(config, prepare(config), plan, dist.get_rank(), start_sample=0, max_steps=steps):
        ids, lengths = (torch.cat([part[name] for part in batch.micro_batches]) for name in ("input_ids", "lengths"))
        mask = (torch.arange(ids.shape[2]) < lengths.unsqueeze(-1)).long()
        columns = [{"input_ids": ids[:, at], "attention_mask": mask[:, at]} for at in range(ids.shape[1])]
        loss = loss_of(columns, torch.empty(0))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # they are views of the buckets
        whole = loss.detach() / WORLD
        dist.all_reduce(whole)
        losses.append(float(whole))
        now = time.perf_counter()
        seconds.append(now - mark)
        mark = now
    return seconds, losses


Side = Callable[[int], tuple[list[float], list[float]]]


def sides_of(folder: Path, sizes: Sizes) -> list[Side]:
    """Sentence-transformers, then each size of micro-batches."""

    def config(pairs: int, steps: int) -> Any:
        return configured(folder, sizes.batch, pairs, WORLD, steps, sizes.seq_len)

    def own(pairs: int) -> Side:
        return lambda steps: own_block(config(pairs, steps))

    return [lambda steps: their_block(config(sizes.pairs[0], steps), sizes.texts), *map(own, sizes.pairs)]


def seconds_of_sides(folder: Path, sizes: Sizes) -> list[float]:
    import torch.distributed as dist

    sides = sides_of(folder, sizes)
    found: list[list[float]] = [[] for _ in sides]
    for _ in range(sizes.blocks):
        for side, seconds in zip(sides, found, strict=True):
            dist.barrier()
            seconds += side(sizes.steps)[0][sizes.warm_up :]
    return [statistics.median(seconds or [0.0]) for seconds in found]


def peaks_of_sides(folder: Path, sizes: Sizes) -> list[tuple[int, float]]:
    """Peak bytes and first loss of each side; the first of two steps keeps no graph."""
    import torch.distributed as dist

    from mgpu_pipe.parallel.device_memory import AllocationWatch

    found = []
    for side in sides_of(folder, sizes):
        dist.barrier()
        with AllocationWatch() as watch:
            _, losses = side(2)
        found.append((watch.peak, losses[0] if losses else 0.0))
    return found


def prepare_steps(folder: Path, sizes: Sizes) -> str:
    """Writes and tokenizes the pairs; returns what both sides do."""
    from mgpu_pipe.data.prepare_data import prepare

    write_pairs(folder / "pairs.jsonl", max(2, sizes.steps) * sizes.batch, sizes.seq_len)
    prepare(configured(folder, sizes.batch, sizes.pairs[0], WORLD, 1, sizes.seq_len))
    return (
        f"BERT of {shape(sizes)}, without dropout, fp32, {WORLD} processes (gloo) of one thread; {sizes.batch} pairs a "
        f"step, texts of {sizes.seq_len} tokens, their mini-batches of {sizes.texts} texts."
    )


def time_steps(folder: Path, sizes: Sizes) -> None:
    notes = prepare_steps(folder, sizes)
    theirs, *own = run_group(WORLD, seconds_of_sides, folder, sizes)[0]
    rows: list[list[Any]] = [
        [f"micro-batches of {pairs} pairs: s a step", seconds, theirs, seconds / theirs, "at most 0.9"]
        for pairs, seconds in zip(sizes.pairs, own, strict=True)
    ]
    notes += f" Medians of {sizes.blocks * (sizes.steps - sizes.warm_up)} steps, blocks alternating."
    write("embeddings_step", "Embeddings over sentence-transformers' cached loss, two processes", rows, notes)


def compare_peaks(folder: Path, sizes: Sizes) -> None:
    notes = prepare_steps(folder, sizes)
    by_rank = run_group(WORLD, peaks_of_sides, folder, sizes)
    losses = [loss for _, loss in by_rank[0]]
    assert max(losses) - min(losses) <= 1e-4 * max(losses), f"not the same loss: {losses}"
    theirs, *own = (max(rank[side][0] for rank in by_rank) / 1e6 for side in range(len(losses)))
    rows: list[list[Any]] = [
        [f"micro-batches of {pairs} pairs: peak MB", peak, theirs, peak / theirs, "at most 1.0"]
        for pairs, peak in zip(sizes.pairs, own, strict=True)
    ]
    write("embeddings_peak", "Peak memory over sentence-transformers' cached loss, two processes", rows, notes)


def shape(sizes: Sizes) -> str:
    model = dict(sizes.model)
    return f"{model['num_hidden_layers']} layers, {model['hidden_size']} wide"


def write(name: str, title: str, rows: list[list[Any]], notes: str) -> None:
    out = finish(name, title, ["what", "first", "second", "ratio", "wanted"], rows, notes)
    print(f"written: {out}", file=sys.stderr)


def batch_peak(folder: Path, batch: int, sizes: Sizes) -> float:
    """Peak bytes of two steps above the loaded model."""
    from mgpu_pipe.models.build import build_meta
    from mgpu_pipe.parallel.device_memory import AllocationWatch

    config = configured(folder, batch, sizes.micro, 1, 2, sizes.seq_len)
    with AllocationWatch() as watch:
        own_block(config)
    model = build_meta(config.model, "AutoModel")
    return watch.peak - sum(parameter.nbytes for parameter in model.parameters())


def compare_batches(folder: Path, sizes: Sizes) -> None:
    write_pairs(folder / "pairs.jsonl", 2 * sizes.large, sizes.seq_len)
    [large], [small] = (run_group(1, batch_peak, folder, batch, sizes) for batch in (sizes.large, sizes.micro))
    what = f"batch {sizes.large} over {sizes.micro}: peak MB above the model"
    rows: list[list[Any]] = [[what, large / 1e6, small / 1e6, large / small, "at most 1.25"]]
    notes = (
        f"BERT of {shape(sizes)}, without dropout, fp32, one process, micro-batches of {sizes.micro} pairs of texts of "
        f"{sizes.seq_len} tokens. Two steps, from the building of the model on."
    )
    write("embeddings_batch", "Peak memory of a large batch of pairs", rows, notes)


def own_encode(folder: Path, texts: Path, out: Path, warm_up: Path) -> float:
    """Seconds of a job of this process group, which begins together."""
    import torch.distributed as dist

    from mgpu_pipe.inference.batch.encode import encode_texts
    from mgpu_pipe.inference.batch.job_folder import Share
    from mgpu_pipe.inference.batch.settings import EncodeSettings
    from mgpu_pipe.inference.open import load_run

    run: Any = load_run(folder)
    width, seconds = int(run.model.config.hidden_size), 0.0
    for path, target in ((warm_up, out.with_name("warm_up.npy")), (texts, out)):
        count = len(path.read_text(encoding="utf-8").splitlines())
        settings = EncodeSettings(folder, path, target, ENCODE_BATCH, False, None, "cpu", "text", "", width, count)
        if dist.get_rank() == 0:
            target.unlink(missing_ok=True)
            settings.folder().root.mkdir()
            settings.folder().begin({})
        dist.barrier()
        began = time.perf_counter()
        encode_texts(settings, run, Share(dist.get_rank(), dist.get_world_size()))
        seconds = time.perf_counter() - began
    return seconds


def time_encode(folder: Path, sizes: Sizes) -> None:
    import numpy as np
    from sentence_transformers import SentenceTransformer

    draw = random.Random(1)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(SHORTEST, LONGEST) - 2)) for _ in range(sizes.files)]
    for name, some in (("texts", texts), ("warm_up", texts[: 2 * ENCODE_BATCH])):
        lines = "".join(f"{json.dumps({'text': text})}\n" for text in some)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    os.environ["OMP_NUM_THREADS"] = "1"
    model, out = SentenceTransformer(str(folder / "model"), device="cpu"), folder / "vectors.npy"
    pool = model.start_multi_process_pool(["cpu"] * WORLD)
    seconds: tuple[list[float], list[float]] = ([], [])
    try:
        model.encode(texts[: 2 * ENCODE_BATCH], pool=pool, batch_size=ENCODE_BATCH)
        for _ in range(sizes.blocks):
            began = time.perf_counter()
            vectors = model.encode(texts, pool=pool, batch_size=ENCODE_BATCH)
            seconds[1].append(time.perf_counter() - began)
            files = (folder / "texts.jsonl", out, folder / "warm_up.jsonl")
            seconds[0].append(max(run_group(WORLD, own_encode, folder / "model", *files)))
    finally:
        model.stop_multi_process_pool(pool)
    np.testing.assert_allclose(np.load(out), vectors, atol=1e-5)
    own, theirs = (sizes.files / statistics.median(side) for side in seconds)
    rows: list[list[Any]] = [["texts a second, own over theirs", own, theirs, own / theirs, "at least 1.0"]]
    notes = (
        f"BERT of {shape(sizes)}, fp32; {sizes.files} texts of {SHORTEST} to {LONGEST} tokens, batches of "
        f"{ENCODE_BATCH}, {WORLD} processes of one thread after their start. Medians of {sizes.blocks} runs. Own times "
        "contain reading and writing of the files."
    )
    write("embeddings_encode", "Vectors of texts, over sentence-transformers' pool of processes", rows, notes)


def deal_towers(folder: Path, sizes: Sizes) -> None:
    from tests.parallel.test_towers import CELLS, all_encoded, busiest_over_mean

    ranks = run_group(4, all_encoded, CELLS)
    sent = sum(rank[at]["sent"][0][0] for rank in ranks for at in range(len(CELLS)))
    exchanged = 3 * sum(cell["exchanged"] for cell in ranks[0])
    rows: list[list[Any]] = []
    for pictures in (16, 32):
        dealt, by_number = busiest_over_mean(pictures)
        what = f"{pictures} pictures, FLOPs of the busiest rank over the mean; dealt by number"
        rows.append([what, dealt, by_number, dealt, "at most 1.1"])
    rows.append(["MB sent over those of features and gradients", sent / 1e6, exchanged / 1e6, sent / exchanged, "1.00"])
    notes = (
        "FLOPs of Qwen2.5-VL's tower by the formula that tests compare with torch's counter; photographs to thumbnails."
    )
    write("embeddings_towers", "Pictures dealt over four tensor-parallel ranks", rows, notes)


PARTS: dict[str, Callable[[Path, Sizes], None]] = {
    "peak": compare_peaks,
    "step": time_steps,
    "batch": compare_batches,
    "towers": deal_towers,
    "encode": time_encode,
}
NARROW = {"hidden_size": 64, "intermediate_size": 256}
"""Of the large batch: memory of features over that of activations does not depend on the width."""


def main() -> None:
    for part in sys.argv[1:] or PARTS:
        sizes = Sizes(model=tuple({**SIZES, **(NARROW if part == "batch" else {})}.items()))
        with tempfile.TemporaryDirectory() as scratch:
            write_model(Path(scratch) / "model", sizes)
            PARTS[part](Path(scratch), sizes)


if __name__ == "__main__":
    main()
