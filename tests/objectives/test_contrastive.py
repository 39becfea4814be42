"""CLIP and SigLIP. Oracle: transformers' own model and loss over the whole batch, in one process."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.memory import contrastive_loss
from mgpu_pipe.architectures.find import family_of
from mgpu_pipe.architectures.formulas.kept_memory import exchanged_bytes
from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.errors import ConfigErrors
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.contrastive import ContrastiveObjective
from mgpu_pipe.objectives.picture_keys import measure_contrastive
from mgpu_pipe.objectives.sample_group import SingleProcess
from mgpu_pipe.training.strategy import EngineStrategy
from mgpu_pipe.verify.certificate import Worst, worst_of
from mgpu_pipe.verify.comparison import compare
from tests.objectives.harness import check_gradients, check_loss, cut, gradients_of, step_loss
from tests.support import small_runs
from tests.support.command import four_steps
from tests.support.needs import need_digits
from tests.support.pictures import folder_of_classes
from tests.support.processes import run_processes
from tests.support.sampling import sampled
from tests.verify.support import small_run

CLIP = ("objective=contrastive", "data=captioned_digits", "model=clip_tiny", "logger=none", "trainer.progress=off")
SIGLIP = {
    "text_config": {"vocab_size": 96, "max_position_embeddings": 16, "pad_token_id": 1},
    "vision_config": {"image_size": 8, "patch_size": 2, "num_channels": 1},
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def detached(config: RunConfig) -> list[Worst]:
    """Measured errors where each process leaves out what the others' losses say of its features."""

    def detach(strategy: EngineStrategy) -> None:
        strategy.sum_of_own = lambda values, own: values[own]  # type: ignore[method-assign]

    return worst_of(compare(config, on_start=detach))


def test_features_without_the_other_processes_gradients_are_found() -> None:
    config = small_run(*CLIP, "trainer.devices=2", "strategy=ddp")
    found = {one.quantity for one in run_processes(2, detached, config)[0] if not one.passed}
    assert "gradient" in found and "loss" not in found


@pytest.mark.slow
def test_the_loss_sends_its_closed_form_and_holds_less_than_the_naive_one() -> None:
    """By the benchmark, whose naive gradients are the oracle."""
    for found in run_processes(4, contrastive_loss.measure, None, 64, 16):
        (peak, _, sent, apart), naive = found["ours"], found["naive"]
        assert sent == contrastive_loss.closed_form(4, 64, 16)
        assert naive[2] == 4 * exchanged_bytes(4 * 64 * 16, 4)
        assert peak < naive[0] and apart < 1e-6
        (peak, _, sent, apart), naive = found["ours, SigLIP"], found["naive SigLIP"]
        assert sent == contrastive_loss.closed_form(4, 64, 16, siglip=True)
        assert peak < naive[0] / 2 and apart < 1e-6


def made(family: str, max_scale: float = 100.0) -> ContrastiveObjective:
    parts = {name: {**TOWER, **fields} for name, fields in SIGLIP.items()}
    if family_of(family).caption_mask:
        parts["text_config"] |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    parts["text_config"]["eos_token_id"] = 5
    model = build_meta(ModelConfig(type=family, config=parts), "AutoModelForZeroShotImageClassification")
    return ContrastiveObjective(materialise(model, 1, "cpu").double(), None, lambda step: 1.0, max_scale)


def compared_with_transformers(objective: ContrastiveObjective, batch: dict[str, torch.Tensor]) -> None:
    """Loss and gradients of six samples, two at a time, with its model's own loss over all at once; captions that are
    read in both directions have a mask."""
    model: Any = objective.model
    batch["pixel_values"] = batch["pixel_values"].double()
    loss = step_loss(objective, cut(batch, 2))
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model._forward_hooks.clear()
    inputs = {name: batch[name] for name in ("pixel_values", "input_ids")}
    if family_of(model.config.model_type).caption_mask:
        ends = torch.tensor([row.index(5) for row in inputs["input_ids"].tolist()])
        inputs["attention_mask"] = (torch.arange(12) <= ends[:, None]).long()
    whole = 6 * model(**inputs, return_loss=True).loss
    whole.backward()
    check_loss(loss, whole, 1e-6)
    wanted = gradients_of(model)
    for name, parameter in model.named_parameters():
        assert (found[name] is None) == (parameter.grad is None), name
        parameter.grad = found[name]
    check_gradients(model, wanted, each=1e-6, whole=1e-9)


@pytest.mark.parametrize("family", ["clip", "siglip", "metaclip_2", "clipseg", "chinese_clip", "altclip"])
def test_loss_and_gradients_are_transformers_own(family: str) -> None:
    objective = made(family)
    with torch.no_grad():
        objective.model.logit_scale.fill_(1.5)  # type: ignore[operator, union-attr]
    compared_with_transformers(objective, objective.random_batch(3, 1, 6, 12, packed=False))


def in_float64(family: str, samples: int, size: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients over all processes, each of which has its share of the samples, ``size`` at a time."""
    objective, world = made(family), contrastive_loss.World() if dist.is_initialized() else SingleProcess()
    bias: Any = getattr(objective.model, "logit_bias", None)
    if bias is not None:  # where it begins, at -10, strangers hardly count
        bias.data.fill_(-0.5)
    batch = objective.random_batch(3, 1, samples, 12, packed=False)
    batch["pixel_values"] = batch["pixel_values"].double()
    share = samples // world.ring
    first = share * (dist.get_rank() if world.ring > 1 else 0)
    starts = range(first, first + share, size)
    parts = [{name: value[at : at + size] for name, value in batch.items()} for at in starts]
    objective.gather_features(parts, len(parts), world)
    loss = torch.zeros((), dtype=torch.float64)
    for part in parts:
        one = objective.micro_batch_loss(part)
        one.backward()  # type: ignore[no-untyped-call]
        loss += one.detach()
    gradients = {name: cast(torch.Tensor, one.grad) for name, one in objective.model.named_parameters()}
    if world.ring > 1:
        for value in (loss, *gradients.values()):
            dist.all_reduce(value)
    return float(loss), gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "family"),
    sampled(product((2, 4, 8), ("clip", "siglip")), lambda *case: case in ((2, "siglip"), (8, "clip"))),
)
def test_in_float64_loss_and_gradients_are_one_processs(family: str, processes: int) -> None:
    loss, gradients = in_float64(family, 16, 16)
    for found, theirs in run_processes(processes, in_float64, family, 16, 1):
        assert found == pytest.approx(loss, rel=1e-12)
        for name, gradient in theirs.items():
            assert (gradient - gradients[name]).norm() <= 1e-12 * max(1.0, float(gradients[name].norm())), name


def test_a_temperature_beyond_its_limit_is_held_there() -> None:
    objective, limited = made("clip"), made("clip", max_scale=10.0)
    batch = objective.random_batch(3, 1, 6, 12, packed=False)
    batch["pixel_values"] = batch["pixel_values"].double()
    for one in (objective, limited):
        one.model.logit_scale.data.fill_(float(np.log(50.0)))  # type: ignore[operator, union-attr]
    with torch.no_grad():
        norms = [one.encode(batch)["images"].norm(dim=1).mean().item() for one in (objective, limited)]
    assert norms == pytest.approx([50, 10], rel=1e-5)


def test_recalls_are_counted_over_all_held_out_samples() -> None:
    objective, random = made("clip"), torch.Generator().manual_seed(7)
    images, texts = (torch.randn(40, 8, generator=random) for _ in range(2))
    labels = torch.randint(0, 12, (40,), generator=random).float()
    pictures = torch.arange(40).float()
    texts = torch.nn.functional.normalize(texts + 0.7 * images, dim=1)
    for rows in (slice(0, 25), slice(25, 40)):
        shown = {"images": images[rows], "texts": texts[rows], "labels": labels[rows], "picture_ids": pictures[rows]}
        objective.collect_heldout(shown, slice(0, rows.stop - rows.start))
    sums = objective.last_sums(SingleProcess())
    assert isinstance(sums, torch.Tensor)
    scores = (images @ texts.T).numpy()
    expected = []
    for matrix in (scores, scores.T):
        ranks = [
            next(at for at, other in enumerate(np.argsort(-row, kind="stable")) if labels[other] == labels[own])
            for own, row in enumerate(matrix)
        ]
        expected += [sum(rank < limit for rank in ranks) for limit in (1, 5, 10)]
    assert sums[1] == 40 and sums[3:].tolist() == expected
    means = {label: texts[labels == label].mean(0) for label in set(labels.tolist())}
    nearest = [max(means, key=lambda one: float(image @ means[one] / means[one].norm())) for image in images]
    assert sums[2] == sum(one == label for one, label in zip(nearest, labels.tolist(), strict=True))
    assert objective.last_sums(SingleProcess()) == 0, "the next evaluation begins anew"


def test_another_caption_of_the_same_picture_is_right() -> None:
    """The usual rule: each picture once, among all captions; each caption once, among all different pictures."""
    objective, random = made("clip"), torch.Generator().manual_seed(11)
    several = [5, 5, 3, 1, 2, 5, 4, 1, 1, 5, 2, 3]  # captions of each picture
    owner = np.repeat(np.arange(12), several)
    seen, said = torch.randn(12, 8, generator=random), torch.randn(36 + 1, 8, generator=random)
    texts = torch.nn.functional.normalize(said + seen[owner], dim=1)
    order = np.random.default_rng(2).permutation(len(owner))  # captions of a picture need not follow each other
    whole = {
        "images": seen[owner[order]],
        "texts": texts[order],
        "labels": torch.from_numpy(order).float(),
        "picture_ids": torch.from_numpy(owner[order]).float(),
    }
    for rows in (slice(0, 20), slice(20, 37)):
        objective.collect_heldout(
            {name: value[rows] for name, value in whole.items()}, slice(0, rows.stop - rows.start)
        )
    sums = objective.last_sums(SingleProcess())
    assert isinstance(sums, torch.Tensor)
    scores = (seen @ texts.T).numpy()
    captions = [min(np.flatnonzero(owner[np.argsort(-row)] == at)) for at, row in enumerate(scores)]
    pictures = [int(np.flatnonzero(np.argsort(-row) == owner[at])[0]) for at, row in enumerate(scores.T)]
    metrics = measure_contrastive([0.0, *sums[1:].tolist(), float(len(owner))])
    for rank in (1, 5, 10):
        assert metrics[f"val/image_to_text_recall@{rank}"] == pytest.approx(np.mean(np.array(captions) < rank))
        assert metrics[f"val/text_to_image_recall@{rank}"] == pytest.approx(np.mean(np.array(pictures) < rank))
    assert 0 < metrics["val/image_to_text_recall@1"] < 1 > metrics["val/text_to_image_recall@1"] > 0


def test_a_row_with_a_list_of_captions_gives_a_sample_for_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = folder_of_classes(tmp_path / "shown", each=10)
    rows = [
        {"image": str(path), "caption": [f"a {path.parent.name} square", f"{path.parent.name} {path.stem}"]}
        for path in sorted(root.rglob("*.png"))
    ]
    listed = tmp_path / "list.jsonl"
    listed.write_text("\n".join(map(json.dumps, rows)))
    config = captioned(tmp_path, f"data.paths=[{listed}]", "data.validation_fraction=0.5")
    prepared = prepare(config)
    assert prepared.amounts() == [(30, "pictures"), (60, "captions")]
    preflight(config)
    picture_ids, labels = {}, {}
    for split, number in (("train", prepared.train_samples), ("validation", prepared.held_out_samples)):  # type: ignore[attr-defined]
        batch = prepared.open(config, split).batch(np.arange(number), np.arange(number))
        picture_ids[split], labels[split] = batch["picture_ids"].tolist(), batch["labels"].tolist()
        assert all(count == 2 for count in Counter(picture_ids[split]).values()), "no picture is on both sides"
    assert len(set(picture_ids["train"])) + len(set(picture_ids["validation"])) == 30
    assert any(count > 1 for count in Counter(labels["train"]).values()), "captions that say the same"
    rows[3]["caption"] = ["whole", None]
    rows[4]["caption"] = []
    listed.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigErrors, match=r"list.jsonl:4: has no caption; correct or remove it"):
        preflight(config)
    config = captioned(tmp_path, f"data.paths=[{listed}]", "data.on_bad_sample=skip")
    preflight(config)
    assert prepare(config).amounts() == [(29, "pictures"), (57, "captions"), (2, "left out")]
    assert f"{listed}:4 has no caption; {listed}:5 has no caption" in caplog.text


def captioned(folder: Path, *overrides: str) -> RunConfig:
    """Pictures with a caption each, in a list."""
    if not (folder / "captions.csv").exists():
        root = folder_of_classes(folder / "pictures", each=20)
        lines = [f"{path.relative_to(folder)},a {path.parent.name} square" for path in sorted(root.rglob("*.png"))]
        (folder / "captions.csv").write_text("\n".join(["image,caption", *lines]) + "\n")
    shape = ("model.config.vision_config.image_size=16", "model.config.vision_config.patch_size=4", "data.seq_len=12")
    given = ("data=captions", f"data.paths=[{folder / 'captions.csv'}]", f"data.cache_dir={folder / 'cache'}")
    more = ("trainer.max_steps=4", "data.validation_fraction=0.2", "data.shift=2", "data.global_batch_size=8")
    return compose([*CLIP, *given, *shape, *more, *overrides])[0]


@pytest.mark.exhaustive  # the runs of test_two_towers.py are alike
def test_a_run_goes_on_under_another_strategy_is_evaluated_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = goes_on_and_is_exported(captioned, "AutoModelForZeroShotImageClassification", tmp_path, capsys)
    assert type(exported).__name__ == "CLIPModel"


def goes_on_and_is_exported(
    composed: small_runs.Composed, loader: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> Any:
    """The exported model of a run that went on under another strategy, as that class of transformers loads it."""
    import transformers

    from mgpu_pipe.cli.main import main
    from mgpu_pipe.inference.open import load_run

    whole, metrics, _ = small_runs.run_on(composed, folder)
    for key in ("train/loss", "val/loss"):
        assert metrics[key] == pytest.approx(whole[key], rel=1e-5), "the same pictures and captions"
    assert metrics["val/image_to_text_recall@5"] == whole["val/image_to_text_recall@5"]
    assert main(["eval", str(folder / "second"), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    shown = re.search(r"^loss +([\d.]+) nats a sample", printed, re.MULTILINE)
    assert shown is not None and "over" in printed
    assert float(shown[1]) == pytest.approx(metrics["val/loss"], abs=1e-6), "printed with six decimals"
    assert f"{100 * metrics['val/text_to_image_recall@1']:.2f}%" in printed
    assert main(["export", str(folder / "second"), "--out", str(folder / "out")]) == 0
    assert f"transformers.{loader}.from_pretrained" in capsys.readouterr().out
    exported, info = getattr(transformers, loader).from_pretrained(folder / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and exported.logit_scale.shape == ()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "out")
    ids = tokenizer("a dark square")["input_ids"]
    assert ids[-1] == exported.config.text_config.eos_token_id == tokenizer.eos_token_id
    pixels = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    inputs = {"pixel_values": pixels, "input_ids": torch.tensor([ids, ids])}
    with torch.no_grad():
        ours, plain = (model(**inputs).logits_per_image for model in (load_run(folder / "second").model, exported))
    assert torch.allclose(ours, plain, rtol=0, atol=1e-6)
    # The folder is trained on, its temperature a scalar.
    given = ("model=hf", f"model.path={folder / 'out'}", "optimizer.lr=0")
    tuned = small_runs.run(composed, folder / "tuned", 2, *given, "strategy=fsdp")
    assert tuned["val/loss"] == pytest.approx(metrics["val/loss"], rel=1e-5)
    return exported


@pytest.mark.slow
def test_four_steps_of_the_experiment(cache: Path, tmp_path: Path) -> None:
    need_digits()
    _, summary, report = four_steps(cache, tmp_path, "clip_digits")
    assert summary["model"]["class"] == "CLIPModel"
    metrics = summary["metrics"]
    assert 0 <= metrics["val/image_to_text_recall@1"] <= metrics["val/image_to_text_recall@10"] <= 1
    assert "val/zero_shot_accuracy" in metrics
    samples = summary["samples"]
    assert len(samples) == 12 and all(f'base64,{sample["image"]}"' in report for sample in samples)
    assert any(sample["text"].endswith(", wrong") for sample in samples)


def test_captions_of_classes_are_drawn_by_seed_and_sample(tmp_path: Path) -> None:
    root = folder_of_classes(tmp_path / "pictures")
    ways = "data.captions=['a {} square','{} it is']"
    given = ("data=captioned_folder", f"data.paths=[{root}]", f"data.cache_dir={tmp_path / 'cache'}", "data.seq_len=12")
    shape = ("model.config.vision_config.image_size=16", "model.config.vision_config.patch_size=4")
    config = compose([*CLIP, *given, *shape, ways, "data.validation_fraction=0.25"])[0]
    prepared = read_prepared(json.loads(json.dumps(prepare(config).as_dict())))
    samples, places = prepared.open(config, "train"), np.arange(prepared.train_samples)
    first, again, later = (samples.batch(places, places + number)["input_ids"] for number in (0, 0, 1000))
    assert torch.equal(first, again) and not torch.equal(first, later)
    labels = samples.batch(places, places)["labels"]
    texts = {(int(label), tuple(ids.tolist())) for label, ids in zip(labels, first, strict=True)}
    assert len(texts) == 6, "three classes, each said in two ways"
    text = prepared.complete(config).model.config["text_config"]
    assert all(text["eos_token_id"] in ids for _, ids in texts)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["image,text", "a.png,b"], "data.caption_column"),
        (["image,caption", "a.png,"], "has no caption"),
        (["image,caption", "gone.png,b"], "there is no file"),
    ],
)
def test_a_list_without_pictures_or_captions_is_refused(tmp_path: Path, lines: list[str], said: str) -> None:
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    folder_of_classes(tmp_path / "p")
    (tmp_path / "p" / "dark" / "0.png").rename(tmp_path / "a.png")
    given = ("data=captions", f"data.paths=[{tmp_path / 'list.csv'}]", "data.seq_len=12")
    with pytest.raises(ConfigErrors, match=re.escape(said)):
        preflight(compose([*CLIP, *given, "model.config.vision_config.image_size=16"])[0])


@pytest.mark.parametrize(
    ("name", "millions"), [("clip_vit_b32", 151.3), ("clip_vit_l14", 427.6), ("siglip2_base", 375)]
)
def test_shipped_models_have_their_published_size(name: str, millions: float) -> None:
    """As the models' cards give it."""
    model = build_meta(compose([f"model={name}"])[0].model, "AutoModelForZeroShotImageClassification")
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=2e-3)
