"""Losses and gradients next to the libraries that people use, and model families next to transformers.

Objectives: the tests that compare them with sentence-transformers, TRL and transformers, on the same batch and weights.
Figures: open_clip's own functions, of the same features.
Families: three steps of ``verify`` in one process, next to transformers' own model and one sample at a time.
``python -m benchmarks.accuracy.encoder_parity`` takes minutes. A family is one line of :data:`FAMILIES`.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.open_clip import OPEN_CLIP, download_open_clip, load_file
from benchmarks.processes import run_group
from benchmarks.support import finish
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.objectives.class_sums import ClassSums, class_vectors
from mgpu_pipe.objectives.picture_keys import measure_contrastive
from mgpu_pipe.objectives.sample_group import SingleProcess
from mgpu_pipe.verify.comparison import compare
from tests.objectives.contracts import CONTRACTS, expanded
from tests.objectives.harness import LARGEST
from tests.objectives.test_contrastive import made
from tests.verify.support import small_run

ST, TRL, HF = "sentence-transformers", "TRL", "transformers"
OBJECTIVES = (
    ("text_embedding, in-batch negatives", ST, r"text_embedding.*::test_loss_.*\[2"),
    ("text_embedding, hard negatives", ST, r"text_embedding.*::test_loss_.*\[[34]"),
    ("text_embedding, Matryoshka sizes", ST, r"text_embedding.*::test_shortened"),
    ("text_embedding, a teacher's margins", ST, r"text_embedding.*::test_a_teachers_.*\[margin_mse"),
    ("text_embedding, a teacher's shares", ST, r"text_embedding.*::test_a_teachers_.*\[kl"),
    ("text_similarity, CoSENT", ST, r"text_similarity.*::test_loss_.*\[cosent"),
    ("text_similarity, cosine", ST, r"text_similarity.*::test_loss_.*\[cosine"),
    ("text_similarity, Matryoshka sizes", ST, r"text_similarity.*::test_shortened"),
    ("reranker, binary", ST, r"reranker.*::test_loss_.*\[binary"),
    ("reranker, listwise", ST, r"reranker.*::test_loss_.*\[listwise"),
    ("reranker, margin", ST, r"reranker.*::test_loss_.*\[margin"),
    ("text_embedding, recall, MRR, NDCG", ST, r"text_embedding.*::test_metrics_"),
    ("text_similarity, correlations", ST, r"text_similarity.*::test_correlations_are_"),
    ("reranker, MRR, NDCG", ST, r"reranker.*::test_metrics_"),
    ("sound_classification", HF, r"sound_classification.*::test_(loss|spectrograms)_"),
    ("sound_tagging", HF, r"sound_classification.*::test_tags_have"),
    ("contrastive, two towers", HF, r"two_towers.*::test_loss_"),
    ("sound_contrastive, CLAP", HF, r"sound_contrastive.*::test_loss_"),
    ("orpo", TRL, r"trl.*::test_pairs_.*\[orpo"),
    ("simpo", TRL, r"trl.*::test_pairs_.*\[simpo"),
    ("cpo", TRL, r"trl.*::test_pairs_.*\[cpo"),
    ("kto", TRL, r"trl.*::test_kto"),
    ("reward, margins", TRL, r"trl.*::test_reward\[0.0"),
    ("reward, margins, centred", TRL, r"trl.*::test_reward\[0.3"),
)
"""Name, library, and a pattern of the tests' names."""
FILES = (
    "text_embedding",
    "text_similarity",
    "reranker",
    "sound_classification",
    "sound_contrastive",
    "two_towers",
    "trl",
)
FAMILIES = {
    "BERT": "masked_lm",
    "RoBERTa": "masked_lm @roberta1",
    "XLM-R": "masked_lm @xlmr",
    "DistilBERT": "masked_lm @distilbert",
    "MPNet": "masked_lm @mpnet",
    "DeBERTa-v3": "masked_lm @deberta",
    "ModernBERT": "masked_lm @modernbert",
    "ELECTRA": "masked_lm @electra",
    "Audio Spectrogram Transformer": "sound_classification model=ast_tiny",
    "Whisper's encoder": "sound_classification model=whisper_tiny",
    "CLAP": "sound_contrastive",
    "Gemma 3": "published_2025 model=gemma3_tiny",
    "Gemma 4": "published_2025 model=gemma4_tiny",
    "Gemma 4 with sound": "published_2025 model=gemma4_tiny @ears",
    "Qwen3.5": "published_2025 model=qwen35_tiny",
    "InternVL": "published_2025 model=internvl_tiny",
    "Mistral 3": "published_2025 model=mistral3_tiny",
    "Llama 4": "published_2025 model=llama4_tiny",
    "Phi-4 multimodal": "published_2025 model=phi4_multimodal_tiny",
    "Qwen3-VL, mixture of experts": "own_sizes model=qwen3_vl_tiny @moe",
    "Qwen2.5-Omni's thinker": "pictures_and_recordings",
    "Qwen3-Omni's thinker": "pictures_and_recordings @omni3",
    "Qwen2-Audio": "recordings",
    "Voxtral": "recordings model=voxtral_tiny",
}
"""The contract of ``tests/objectives/contracts.py`` whose objective and data a family has, and its overrides."""
ALONE = ("strategy=single", "trainer.devices=1", "data.micro_batch_size=2", "logger=none", "trainer.progress=off")
COLUMNS = ("what", "next to", "precision", "loss or figure", "gradient")
PRECISIONS = ("fp32", "float64")


class Recorder:
    """Plug-in of pytest that runs the tests of :data:`OBJECTIVES` and keeps the largest differences, by row."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], dict[str, float]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if any(re.search(pattern, item.nodeid) for _, _, pattern in OBJECTIVES)]

    def pytest_runtest_setup(self) -> None:
        LARGEST.clear()

    def pytest_runtest_teardown(self, item: Any) -> None:
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        exact = any(name in item.nodeid for name in ("two_towers", "sound_contrastive")) or torch.float64 in given
        for name in (name for name, _, pattern in OBJECTIVES if re.search(pattern, item.nodeid)):
            largest = self.found.setdefault((name, PRECISIONS[exact]), {})
            for quantity, difference in LARGEST.items():
                largest[quantity] = max(difference, largest.get(quantity, 0.0))


def objective_rows() -> list[list[Any]]:
    """Rows of the objectives, from their tests.

    Raises:
        SystemExit: a test failed or a library is not installed.
    """
    recorder = Recorder()
    files = [f"tests/objectives/test_{name}.py" for name in FILES]
    if pytest.main([*files, "-q", "-W", "ignore", "-p", "no:cacheprovider"], plugins=[recorder]):
        raise SystemExit("a test failed: see above")
    rows = []
    for name, library, _ in OBJECTIVES:
        for precision in PRECISIONS:
            largest = recorder.found.get((name, precision), {})
            if "figure" in largest:
                rows.append([name, library, "", largest["figure"], ""])
            elif largest:
                rows.append([name, library, precision, largest["loss"], largest["gradient"]])
    if missing := {name for name, _, _ in OBJECTIVES} - {row[0] for row in rows}:
        raise SystemExit(f"no test measured {', '.join(sorted(missing))}; pip install '.[dev]'")
    return rows


def differences(config: RunConfig) -> list[float]:
    """Largest differences of losses and of gradients over the steps of a small run."""
    measured = compare(config)
    return [max(each.error for each in measured if each.quantity == name) for name in ("loss", "gradient")]


def family_row(name: str, words: str) -> list[Any]:
    contract, *changes = words.split()
    config = small_run(*CONTRACTS[contract].words.split(), *expanded(" ".join(changes)), *ALONE)
    return [name, HF, "fp32", *run_group(1, differences, config)[0]]


def zero_shot_rows(theirs: Path) -> list[list[Any]]:
    """Vectors of classes by several prompts, and the counts of right answers, of random features."""
    generator = torch.Generator().manual_seed(0)
    classes, templates = 40, 5
    prompts = torch.randn(classes * templates, 32, generator=generator)
    ours = class_vectors(lambda rows: prompts[rows[:, 0]], torch.arange(len(prompts)).view(classes, templates, 1))
    vectors = load_file(theirs / "open_clip" / "zero_shot_classifier.py").build_zero_shot_classifier(
        SimpleNamespace(encode_text=lambda rows, normalize: F.normalize(prompts[rows], dim=1)),
        lambda texts: torch.tensor([sum(int(word) for word in text.split("+")) for text in texts]),
        [str(templates * number) for number in range(classes)],
        [f"{{}}+{number}" for number in range(templates)],
    )
    labels = torch.randint(0, classes, (500,), generator=generator)
    pictures = F.normalize(ours[labels] + torch.randn(500, 32, generator=generator) / 2, dim=1)
    scored = load_file(theirs / "open_clip_train" / "zero_shot.py")
    vars(scored)["float"] = lambda array: array.item()  # newer numpy refuses float() of an array of one number
    wanted = torch.tensor(scored.accuracy(100 * pictures @ vectors, labels, topk=(1, 5)))
    counts = ClassSums(classes).sums(torch.zeros(()), 100 * pictures @ ours.T, labels)[1:3]
    return [
        figure_row("zero-shot classes, 5 templates", ours.T, vectors),
        figure_row("zero-shot top-1 and top-5", counts, wanted),
    ]


def retrieval_row(theirs: Path) -> list[Any]:
    """Recall at 1, 5 and 10 of pictures and captions in pairs, both ways."""
    generator, pairs = torch.Generator().manual_seed(1), 300
    images = F.normalize(torch.randn(pairs, 32, generator=generator), dim=1)
    texts = F.normalize(images + torch.randn(pairs, 32, generator=generator) / 3, dim=1)
    numbers = torch.arange(pairs).float()
    objective = made("clip")
    features = {"images": images, "texts": texts, "labels": numbers, "picture_ids": numbers}
    objective.collect_heldout(features, slice(0, pairs))
    sums = objective.last_sums(SingleProcess())
    assert isinstance(sums, torch.Tensor)
    found = measure_contrastive([0.0, *sums[1:].tolist(), float(pairs)])
    known = load_file(theirs / "open_clip_train" / "train.py").get_clip_metrics(images, texts, 1.0)
    places = [(way, rank) for way in ("image_to_text", "text_to_image") for rank in (1, 5, 10)]
    ours = torch.tensor([found[f"val/{way}_recall@{rank}"] for way, rank in places], dtype=torch.float64)
    wanted = torch.tensor([known[f"{way}_R@{rank}"] for way, rank in places], dtype=torch.float64)
    return figure_row("retrieval recall at 1, 5, 10", ours, wanted)


def figure_row(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> list[Any]:
    difference = float((ours - theirs).abs().max())
    return [name, "open_clip", "", difference, ""]


def main() -> None:
    rows = objective_rows()
    with tempfile.TemporaryDirectory() as folder:
        theirs = download_open_clip(folder)
        rows += [*zero_shot_rows(theirs), retrieval_row(theirs)]
    rows += [family_row(name, words) for name, words in FAMILIES.items()]
    notes = (
        "Largest differences: of a loss, relative; of a parameter's gradient, over the norm of all gradients. "
        f"A figure's: absolute, of random features; {OPEN_CLIP}. "
        "Families: tiny models, three steps of verify, next to one sample at a time without padding."
    )
    finish("encoder_parity", "Objectives and families next to the libraries that people use", COLUMNS, rows, notes)


if __name__ == "__main__":
    main()
