"""CLAP. Oracle: transformers' own model over the whole batch, and its feature extractor, in one process."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.clap_mel import ClapMel
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.sound_contrastive import SoundContrastiveObjective
from tests.inference.support import write_tokenizer
from tests.models.tiny import write_folder
from tests.objectives.contracts import CLAP_WORDS
from tests.objectives.harness import check_evaluated, check_gradients, check_loss, cut, gradients_of, step_loss
from tests.support import small_runs
from tests.support.needs import need_speech
from tests.support.sounds import RATE, TEXTS, tones, write_wav

GIVEN = ("objective=sound_contrastive", "logger=none", "trainer.progress=off")
WINDOW = {"hop_length": 80, "max_length_s": 1, "fft_window_size": 128, "frequency_min": 50, "frequency_max": 3500}
EXTRACTOR = {"feature_extractor_type": "ClapFeatureExtractor", "feature_size": 8, "sampling_rate": RATE, **WINDOW}


def made() -> Any:
    """A CLAP whose norm has statistics, which are those of decibels."""
    model: Any = materialise(build_meta(compose([*GIVEN, *CLAP_WORDS.split()])[0].model, "AutoModel"), 1, "cpu")
    norm, generator = model.audio_model.audio_encoder.batch_norm, torch.Generator().manual_seed(5)
    norm.running_mean.copy_(-40 + 5 * torch.randn(8, generator=generator))
    norm.running_var.copy_(100 + 40 * torch.rand(8, generator=generator))
    return model.train()


def folder_of_clap(folder: Path, **changes: Any) -> Path:
    """A published folder: weights with statistics, a tokenizer, a feature extractor."""
    write_tokenizer(folder)
    write_folder(made(), folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**EXTRACTOR, "truncation": "rand_trunc", "padding": "repeatpad", **changes})
    )
    return folder


def list_of_captions(folder: Path) -> Path:
    """Tones whose captions name their letters; a quarter of them have two captions."""
    rows = []
    for number in range(30):
        text = TEXTS[number % len(TEXTS)]
        write_wav(folder / f"{number}.wav", tones(text * (1 + number % 3), number))
        said = [f"tones {text}", f"the tones {text} of a flute"]
        rows.append({"path": f"{number}.wav", "caption": said if number % 4 == 0 else said[0]})
    (folder / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder / "captions.jsonl"


def captioned(folder: Path, *overrides: str) -> RunConfig:
    """:func:`list_of_captions` and :func:`folder_of_clap`."""
    if not (folder / "captions.jsonl").exists():
        list_of_captions(folder)
    if not (folder / "clap").exists():
        folder_of_clap(folder / "clap")
    given = ("model=hf", f"model.path={folder / 'clap'}", "data=captioned_audio_list", "data.seq_len=24")
    more = (f"data.paths=[{folder / 'captions.jsonl'}]", f"data.cache_dir={folder / 'cache'}", "trainer.max_steps=4")
    sizes = ("data.validation_fraction=0.2", "data.global_batch_size=8", "data.noise=0.05", "optimizer.lr=1e-3")
    return compose([*GIVEN, *given, *more, *sizes, *overrides])[0]


def test_loss_and_gradients_are_those_of_transformers_logits_over_the_whole_batch() -> None:
    model = made().double()
    statistics = model.audio_model.audio_encoder.batch_norm.running_mean.clone()
    objective = SoundContrastiveObjective(model, None, lambda step: 1.0)
    with torch.no_grad():
        model.logit_scale_a.fill_(1.5)
        model.logit_scale_t.fill_(1.2)
    batch = objective.random_batch(3, 1, 6, 12, packed=False)
    batch["input_features"] = 10 * batch["input_features"].double() - 40
    loss = step_loss(objective, cut(batch, 2))
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert torch.equal(model.audio_model.audio_encoder.batch_norm.running_mean, statistics)
    model.zero_grad()
    model._forward_hooks.clear()
    plain = made().double()
    plain.load_state_dict(model.state_dict())
    ends = torch.tensor([row.index(objective._end) for row in batch["input_ids"].tolist()])
    mask = (torch.arange(12) <= ends[:, None]).long()
    inputs = {"input_ids": batch["input_ids"], "input_features": batch["input_features"], "attention_mask": mask}
    output, rows = plain.eval()(**inputs), torch.arange(6)
    whole = 3 * (F.cross_entropy(output.logits_per_audio, rows) + F.cross_entropy(output.logits_per_text, rows))
    whole.backward()
    check_loss(loss, whole, 1e-10)
    wanted = gradients_of(plain)
    for name, parameter in plain.named_parameters():
        assert (found[name] is None) == (parameter.grad is None), name
        parameter.grad = found[name]
    check_gradients(plain, wanted, each=1e-8, whole=1e-10)


def test_spectrograms_are_the_extractors_and_parts_are_drawn_by_sample(tmp_path: Path) -> None:
    from transformers import AutoFeatureExtractor

    need_speech()
    config = captioned(tmp_path, "data.noise=0", "data.validation_fraction=0.25")
    prepared: Any = read_prepared(json.loads(json.dumps(prepare(config).as_dict())))
    assert prepared.train_samples + prepared.held_out_samples == 38, "a list of captions gives a sample for each"
    samples: Any = prepared.open(config, "train")
    indices = np.arange(len(samples))
    read = SoundContrastiveObjective.samples(config, samples)
    batch = read.batch(indices, 50 + indices)
    extractor = AutoFeatureExtractor.from_pretrained(tmp_path / "clap")
    lengths = [len(samples.recording(index)) for index in indices.tolist()]
    assert min(lengths) < RATE / 2 and max(lengths) > RATE, "repeated ones and cut ones"
    for index in indices.tolist():
        part = samples.part(samples.recording(index), 50 + index)
        expected = extractor(part, sampling_rate=RATE, return_tensors="pt")["input_features"]
        torch.testing.assert_close(batch["input_features"][index], expected[0].float(), rtol=0, atol=1e-4)
    again = read.batch(indices[3:5], 53 + np.arange(2))
    assert torch.equal(batch["input_features"][3:5], again["input_features"]), "however the batch is cut"
    assert torch.equal(batch["input_ids"][3:5], again["input_ids"])
    longest = int(np.argmax(lengths))
    parts = {samples.part(samples.recording(longest), number).tobytes() for number in range(20)}
    assert len(parts) > 10
    same = [
        (a, b) for a in indices for b in indices if a < b and batch["recording_ids"][a] == batch["recording_ids"][b]
    ]
    assert same and all(batch["labels"][a] != batch["labels"][b] for a, b in same)


@pytest.mark.parametrize(
    ("changes", "words", "said"),
    [
        ({"truncation": "fusion"}, (), "truncation=fusion joins several spectrograms"),
        ({}, ("model.config.audio_config.enable_fusion=true",), "audio_config.enable_fusion=true joins several"),
        ({"feature_size": 16}, (), "its feature extractor does not fit the model: feature_size=16, not 8"),
        ({"max_length_s": 2}, (), "its extractor makes 201 frames, and its model takes 128"),
        ({}, ("strategy=tp", "trainer.devices=2"), "strategy.tp"),
        ({}, ("strategy.pp=2", "strategy=pp", "trainer.devices=2"), "strategy.pp"),
    ],
)
def test_what_cannot_be_learnt_is_refused_in_a_line(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...], said: str
) -> None:
    need_speech()
    folder_of_clap(tmp_path / "clap", **changes)
    with pytest.raises(BadInputError) as refused:
        preflight(captioned(tmp_path, *words))
    assert said in str(refused.value), refused.value


def test_a_new_model_is_refused(tmp_path: Path) -> None:
    need_speech()
    captioned(tmp_path)
    new = ("model.path=null", *CLAP_WORDS.split()[1:])
    with pytest.raises(BadInputError, match=r"model\.type=clap: the statistics of its batch norm stay as they are"):
        preflight(captioned(tmp_path, *new))


run = partial(small_runs.run, captioned)


@pytest.mark.slow
def test_strategies_agree_and_an_export_has_the_same_vectors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoFeatureExtractor, AutoModel, AutoTokenizer

    from mgpu_pipe.cli.main import main
    from mgpu_pipe.inference.open import load_run

    need_speech()
    saves = ("checkpoint.every_n_steps=2", "checkpoint.keep_last=0")
    whole = run(tmp_path / "whole", 1, "strategy=single")
    run(tmp_path / "first", 2, "strategy=fsdp", *saves)
    saved = tmp_path / "first" / "checkpoints" / "step-00000002"
    metrics = run(tmp_path / "second", 2, "strategy=ddp", resume=saved)
    for key in ("train/loss", "val/loss"):
        assert metrics[key] == pytest.approx(whole[key], rel=1e-5), "the same parts and captions"
    assert metrics["val/sound_to_text_recall@5"] == whole["val/sound_to_text_recall@5"]
    recall = f"{100 * metrics['val/text_to_sound_recall@1']:.2f}%"
    check_evaluated(tmp_path / "second", capsys, f"{metrics['val/loss']:.6f} nats a sample", recall)
    assert main(["export", str(tmp_path / "second"), "--out", str(tmp_path / "out")]) == 0
    assert "transformers.AutoModel.from_pretrained" in capsys.readouterr().out
    exported, info = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(exported).__name__ == "ClapModel" and not info["missing_keys"] and not info["unexpected_keys"]
    norm = exported.audio_model.audio_encoder.batch_norm
    assert torch.equal(norm.running_mean, made().audio_model.audio_encoder.batch_norm.running_mean)
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("tones ab")["input_ids"]
    assert ids[-1] == exported.config.text_config.eos_token_id
    window = ClapMel.from_model(captioned(tmp_path).model, RATE)
    assert window is not None
    features = torch.from_numpy(window.extract([tones("ab", 1), tones("ba ab", 2)]))
    extractor = AutoFeatureExtractor.from_pretrained(tmp_path / "out")
    expected = extractor(tones("ab", 1), sampling_rate=RATE, return_tensors="pt")["input_features"]
    torch.testing.assert_close(features[0], expected[0].float(), rtol=0, atol=1e-4)
    inputs = {"input_features": features, "input_ids": torch.tensor([ids, ids])}
    with torch.no_grad():
        ours, plain = (
            model.eval()(**inputs).logits_per_audio for model in (load_run(tmp_path / "second").model, exported)
        )
    assert torch.allclose(ours, plain, rtol=0, atol=1e-6)
    places = ("--input", str(tmp_path / "captions.jsonl"), "--output", str(tmp_path / "vectors.npy"))
    assert main(["encode", str(tmp_path / "second"), *places]) == 2
    assert "learned objective=sound_contrastive" in capsys.readouterr().err
    tuned = run(tmp_path / "tuned", 1, f"model.path={tmp_path / 'out'}", "optimizer.lr=0", "strategy=single")
    assert tuned["val/loss"] == pytest.approx(metrics["val/loss"], rel=1e-5)
