"""A run's folder made without training: a tiny model's initial weights saved as a checkpoint, and a tokenizer."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mgpu_pipe.checkpoint.save import save
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.config.freeze import freeze, remember
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.models.build import build_meta, materialise
from tests.models.tiny import tiny_model

VOCABULARY = 300
WORDS = [
    *("the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "while", "a", "small", "cat", "sleeps"),
    *("near", "an", "old", "oak", "tree"),
]


def write_texts(folder: Path, documents: int) -> Path:
    """Text files of cyclic word lists, each different."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        words = [WORDS[(start * (number + 1)) % len(WORDS)] for start in range(40 + 7 * number)]
        (folder / f"{number:03d}.txt").write_text(" ".join(words) + "\n", encoding="utf-8")
    return folder


def write_tokenizer(folder: Path) -> Path:
    """A byte-level BPE, as the data side trains them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.save_pretrained(str(folder))
    return folder


def write_run(
    root: Path, family: str, texts: Path, cache: Path, scale: float = 4.0, **fields: object
) -> PreTrainedModel:
    """A run's folder at ``root`` with one checkpoint, step 3; returns the model that was saved.

    Args:
        scale: what initial weights are multiplied by, so that next-token distributions are far from flat.
        fields: of the model's configuration.
    """
    paths = RunPaths(root)
    tokenizer = write_tokenizer(paths.tokenizer)
    data = DataConfig(
        source="text_files",
        paths=[str(texts / "*.txt")],
        tokenizer=str(tokenizer),
        seq_len=32,
        global_batch_size=5,
        validation_fraction=0.3,
        cache_dir=str(cache),
        tokenize_workers=1,
        micro_batch_size="auto",
    )
    model_config = tiny_model(family, **{"vocab_size": VOCABULARY + 4, "bos_token_id": None, **fields})
    config = RunConfig(seed=11, model=model_config, data=data)
    freeze(config, paths.config)
    paths.environment.write_text(json.dumps({"created": time.time()}))
    remember(paths.config)
    model = materialise(build_meta(config.model), config.seed, "cpu").eval()
    shards = []
    for name, parameter in model.named_parameters():
        parameter.data.mul_(scale)
        shape = tuple(parameter.shape)
        shards.append(LocalShard(TensorSlice.whole(name, shape), shape, parameter.data))
    save(paths.checkpoints, 3, shards, [], {"samples": 15}, paths.config)
    return model
