"""Sound classification. Oracle: transformers' own model on one recording at a time, without padding, in one process."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score
from transformers import AutoFeatureExtractor

from mgpu_pipe.architectures.find import families_in_role
from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.audio.filter_bank import FilterBank, window_of
from mgpu_pipe.data.audio.listen import Sound
from mgpu_pipe.data.audio.speech_source import AudioConfig
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors, DataError
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.fields import config_fields
from mgpu_pipe.objectives.sound_classification import SoundClassificationObjective, SoundTaggingObjective
from tests.objectives.harness import check_alone, check_classes, check_evaluated, check_trained_on
from tests.objectives.test_ctc import FIELDS
from tests.support import small_runs
from tests.support.command import four_steps
from tests.support.labelled_sounds import folder_of_sounds, heard, list_of_classes
from tests.support.needs import need_speech
from tests.support.sounds import RATE, tones, write_wav

SOUNDS = ("objective=sound_classification", "model=wav2vec2_tiny", "logger=none", "trainer.progress=off")
CLASSES = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}


SPECTROGRAMS: dict[str, dict[str, Any]] = {
    "whisper": {
        **{"d_model": 32, "num_mel_bins": 8, "max_source_positions": 16, "classifier_proj_size": 16},
        **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_layers": 1},
    },
    "audio-spectrogram-transformer": {
        **{name: FIELDS[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
        **{"num_attention_heads": 4, "max_length": 16, "num_mel_bins": 8, "patch_size": 4, "frequency_stride": 2},
        **{"time_stride": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    },
}


def made(family: str, **fields: Any) -> torch.nn.Module:
    known = config_fields(family) or set()
    usual = SPECTROGRAMS.get(family, {**FIELDS, "classifier_proj_size": 16})
    given = {name: value for name, value in {**usual, **fields}.items() if name in known}
    model = build_meta(ModelConfig(type=family, config={**given, **CLASSES}), "AutoModelForAudioClassification")
    return materialise(model, 1, "cpu").train()


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("family", [*SPECTROGRAMS, "wav2vec2"])
def test_a_recording_is_heard_as_the_extractor_of_the_folder_hears_it(
    tmp_path: Path, family: str, normalises: bool
) -> None:
    """Whisper's extractor does not read ``do_normalize`` of its file."""
    model: Any = made(family, max_source_positions=RATE // 320)
    model.save_pretrained(tmp_path)
    kinds = {"whisper": "WhisperFeatureExtractor", "audio-spectrogram-transformer": "ASTFeatureExtractor"}
    said: dict[str, Any] = {"feature_extractor_type": kinds.get(family, "Wav2Vec2FeatureExtractor")}
    if family == "whisper":
        said |= {"feature_size": 8, "chunk_length": 1}
    elif family in kinds:
        said |= {"num_mel_bins": 8, "max_length": 16, "mean": -3.0, "std": 2.0}
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**said, "do_normalize": normalises, "sampling_rate": RATE}))
    source = ModelConfig(path=str(tmp_path))
    sound = Sound.from_config(AudioConfig(), source)
    window = window_of(source, sound.rate)
    wave = np.random.default_rng(0).normal(0.1, 0.2, RATE // 8).astype(np.float32)
    found = sound.standardise(wave)[None] if window is None else window.extract([sound.standardise(wave)])
    expected = AutoFeatureExtractor.from_pretrained(tmp_path)(wave, sampling_rate=RATE, return_tensors="np")
    name = "input_values" if window is None else window.input_name
    np.testing.assert_allclose(found, expected[name], atol=1e-4)


@pytest.mark.parametrize("family", SPECTROGRAMS)
def test_spectrograms_have_the_loss_and_gradients_of_recordings_alone(family: str) -> None:
    check_alone(SoundClassificationObjective(made(family), None, lambda step: 1.0, 0.1), made(family))


@pytest.mark.parametrize("family", ["wav2vec2", "audio-spectrogram-transformer"])
def test_tags_have_the_loss_of_transformers_and_their_figures_are_counts(family: str) -> None:
    objective = SoundTaggingObjective(made(family), None, lambda step: 1.0)
    check_alone(objective, made(family))
    batch = objective.random_batch(3, 2, 6, 0, packed=False)
    labels = batch["labels"][:-1]
    with torch.no_grad():
        sums = objective.evaluation_sums(batch).tolist()
        logits = objective.model(**objective.model_inputs(batch)).logits[:-1]
    assert sums[0] / 5 == pytest.approx(float(torch.nn.BCEWithLogitsLoss()(logits, labels)), rel=1e-5)
    said = (logits.sigmoid() > 0.5).numpy()
    measured = objective.description.measured([*sums, 5.0])
    assert measured["val/f1"] == pytest.approx(f1_score(labels.numpy() > 0.5, said, average="micro"))
    assert measured["val/exact_match"] == pytest.approx(accuracy_score(labels.numpy() > 0.5, said))
    true = labels.numpy() > 0.5
    counts = {"samples": true.sum(0), "right": (said & true).sum(0), "predicted": said.sum(0)}
    assert objective.findings([*sums, 5.0]) == {"classes": {name: count.tolist() for name, count in counts.items()}}


@pytest.mark.parametrize("norm", ["group", "layer"])
@pytest.mark.parametrize("family", families_in_role("waveform_encoder"))
def test_loss_and_gradients_are_those_of_recordings_alone(family: str, norm: str) -> None:
    layered = {"feat_extract_norm": norm, "do_stable_layer_norm": norm == "layer"}
    objective = SoundClassificationObjective(made(family, **layered), None, lambda step: 1.0, 0.1)
    check_alone(objective, made(family, **layered))


def test_metrics_are_counts_and_padded_rows_count_nothing() -> None:
    objective = SoundClassificationObjective(made("wav2vec2"), None, lambda step: 1.0, 0.2)
    check_classes(objective, objective.random_batch(3, 2, 6, 0, packed=False))


def labelled(folder: Path, *overrides: str) -> RunConfig:
    """Tones in folders of their classes."""
    root = folder / "sounds"
    if not root.exists():
        folder_of_sounds(root)
    given = (f"data.paths=[{root}]", f"data.cache_dir={folder / 'cache'}", f"data.sampling_rate={RATE}")
    more = ("trainer.max_steps=4", "data.validation_fraction=0.2", "data.global_batch_size=6", "data.sort_steps=2")
    changes = ("data.speed=0.1", "data.noise=0.05", "optimizer.lr=3e-4")
    return compose([*SOUNDS, "data=audio_folder", *given, *more, *changes, *overrides])[0]


def test_a_list_and_folders_give_the_same_samples(tmp_path: Path) -> None:
    need_speech()
    config = labelled(tmp_path, "data.validation_fraction=0.25", "data.speed=0", "data.noise=0")
    prepared: Any = read_prepared(json.loads(json.dumps(prepare(config).as_dict())))
    assert prepared.classes == ["high", "low", "mixed"], "in sorted order"
    assert prepared.train_samples + prepared.held_out_samples == 30
    assert prepared.model_fields()["id2label"]["1"] == "low"
    samples = prepared.open(config, "train")
    numbers = np.arange(len(samples))
    batch = samples.batch(numbers, numbers)
    for row, path in enumerate(np.array(sorted((tmp_path / "sounds").rglob("*.wav")))[prepared.indices("train")]):
        wave = torch.from_numpy(heard(path)).double()
        assert prepared.classes[batch["labels"][row]] == path.parent.name
        assert batch["lengths"][row] == len(wave) and not batch["input_values"][row, len(wave) :].any()
        expected = (wave - wave.mean()) / wave.std(correction=0)
        assert torch.allclose(batch["input_values"][row, : len(wave)].double(), expected, atol=1e-4)
    list_of_classes(tmp_path / "sounds")
    given = ("data=labelled_audio_list", f"data.paths=[{tmp_path / 'sounds' / 'sounds.csv'}]", "data.speed=0")
    listed: Any = prepare(labelled(tmp_path, *given, "data.noise=0", "data.validation_fraction=0.25"))
    assert listed.digest == prepared.digest and listed.classes == prepared.classes


def test_split_folders_are_found_and_a_class_that_is_only_held_out_is_refused(tmp_path: Path) -> None:
    need_speech()
    folder_of_sounds(tmp_path / "sounds" / "train", each=4)
    held = folder_of_sounds(tmp_path / "sounds" / "val", each=2, first=50)
    prepared: Any = prepare(labelled(tmp_path))
    assert (prepared.train_samples, prepared.held_out_samples) == (12, 6) and prepared.validation_digest
    write_wav(held / "loose.wav", tones("ab", 76))
    told = prepare(labelled(tmp_path)).told
    assert "val held out" in told and "1 recordings in no folder of a class are left out" in told
    (held / "strange").mkdir()
    write_wav(held / "strange" / "0.wav", tones("ab", 77))
    with pytest.raises(ConfigError, match=r"no training sample has the class 'strange'.*data.classes"):
        prepare(labelled(tmp_path))
    known: Any = prepare(labelled(tmp_path, "data.classes=[high,low,mixed,strange]"))
    assert "no training recording has the class strange" in known.told


def test_filter_banks_are_those_of_transformers_feature_extractor(tmp_path: Path) -> None:
    from transformers import ASTFeatureExtractor

    need_speech()
    config = labelled(tmp_path, "model=ast_tiny", "data.sampling_rate=16000", "data.speed=0", "data.noise=0")
    samples = prepare(config).open(config, "train")
    taken = SoundClassificationObjective.samples(config, samples).batch(np.arange(5), np.arange(5))
    bank = FilterBank.from_model(config.model, 16000)
    assert bank is not None
    extractor = ASTFeatureExtractor(**bank.settings())
    for row in range(5):
        wave = samples.recording(row)  # type: ignore[attr-defined]
        expected = extractor(wave, sampling_rate=16000, return_tensors="pt").input_values[0]
        assert torch.equal(taken["input_values"][row], expected)


def test_segments_are_drawn_by_sample_in_training_and_the_middle_in_an_evaluation(tmp_path: Path) -> None:
    need_speech()
    plain = ("data.speed=0", "data.noise=0", "data.validation_fraction=0.25")
    config = labelled(tmp_path, *plain, "data.segment_seconds=0.1")
    prepared = prepare(config)
    assert prepared.digest != prepare(labelled(tmp_path, *plain)).digest
    samples: Any = prepared.open(config, "train")
    indices = np.arange(8)
    batch, again = samples.batch(indices, 50 + indices), samples.batch(indices[2:4], 52 + indices[:2])
    assert batch["input_values"].shape == (8, RATE // 10)
    assert torch.equal(batch["input_values"][2:4], again["input_values"]), "however the batch is cut"
    wave = samples.recording(0)
    draws = [samples.part(wave, number) for number in range(40)]
    starts = {next(at for at in range(len(wave)) if np.array_equal(wave[at : at + 800], draw)) for draw in draws}
    assert len(starts) > 20 and min(starts) < 0.2 * (len(wave) - 800) and max(starts) > 0.8 * (len(wave) - 800)
    held: Any = prepared.open(config, "validation")
    whole, spare = held.recording(0), len(held.recording(0)) - 800
    assert np.array_equal(held.part(whole, -1), whole[spare // 2 : spare // 2 + 800])
    short = labelled(tmp_path, "data.segment_seconds=0.0001")
    assert "use at least" in refused(short)


def test_a_recording_of_two_classes_is_named(tmp_path: Path) -> None:
    need_speech()
    write_wav(tmp_path / "0.wav", tones("ab", 1))
    (tmp_path / "list.csv").write_text("path,label\n0.wav,a\n0.wav,b\n")
    given = ("data=labelled_audio_list", f"data.paths=[{tmp_path / 'list.csv'}]", "data.validation_fraction=0")
    known: Any = prepare(compose([*SOUNDS, *given, f"data.cache_dir={tmp_path / 'cache'}"])[0])
    assert known.told.startswith("1 recordings stand under several classes") and known.told.endswith("0.wav)")


def test_recordings_longer_than_the_window_need_a_segment(tmp_path: Path) -> None:
    need_speech()
    window = ("model=ast_tiny", "model.config.max_length=25", "data.sampling_rate=16000", "data.speed=0")
    assert "use data.segment_seconds=0.265" in refused(labelled(tmp_path, *window))
    assert "data.segment_seconds=1.0: the model takes at most" in refused(
        labelled(tmp_path, *window, "data.segment_seconds=1")
    )
    known: Any = prepare(labelled(tmp_path, *window, "data.segment_seconds=0.265"))
    assert known.train_samples + known.held_out_samples == 30


def tagged(folder: Path, *overrides: str) -> RunConfig:
    """Tones whose letters are their classes, in a list."""
    if not (folder / "tags.jsonl").exists():
        folder.mkdir(exist_ok=True)
        rows = []
        for number in range(24):
            letters = ("a", "b", "ab", " ")[number % 4]
            write_wav(folder / f"{number}.wav", tones(letters * 2, number))
            rows.append({"path": f"{number}.wav", "label": sorted(set(letters.strip()))})
        (folder / "tags.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    given = ("objective=sound_tagging", "data=tagged_audio_list", f"data.paths=[{folder / 'tags.jsonl'}]")
    return labelled(folder, *given, *overrides)


def test_tags_are_lists_or_names_between_signs(tmp_path: Path) -> None:
    need_speech()
    config = tagged(tmp_path, "data.validation_fraction=0.25")
    prepared: Any = prepare(config)
    assert prepared.classes == ["a", "b"] and prepared.complete(config).model.config["problem_type"]
    labels = np.concatenate([prepared.labels(split) for split in ("train", "validation")])
    assert labels.dtype == np.float32 and labels.sum(0).tolist() == [12, 12] and (labels.sum(1) == 0).sum() == 6
    rows = ["path,label", "0.wav,a", '1.wav,"b, a"', '2.wav,"[""a,b""]"', "4.wav,b", "5.wav,a;b", "6.wav,a | b"]
    python = ["""8.wav,"['a', 'b']" """.strip(), """9.wav,['a']"""]
    (tmp_path / "tags.csv").write_text("\n".join([*rows, *python]) + "\n")
    names = (f"data.paths=[{tmp_path / 'tags.csv'}]", "data.validation_fraction=0")
    listed: Any = prepare(tagged(tmp_path, *names))
    assert listed.classes == ["a", "a,b", "b"]
    both = [[1, 0, 1]] * 3
    assert listed.labels("train").tolist() == [[1, 0, 0], [1, 0, 1], [0, 1, 0], [0, 0, 1], *both, [1, 0, 0]]
    for field, said in (("", "has no class"), ('"a;b, c"', "by commas and by other signs")):
        (tmp_path / "tags.csv").write_text(f"path,label\n0.wav,{field}\n")
        assert said in refused(tagged(tmp_path, *names))


def refused(config: RunConfig) -> str:
    with pytest.raises(BadInputError) as found:
        preflight(config)
        prepare(config)
    return "; ".join(map(str, found.value.errors)) if isinstance(found.value, ConfigErrors) else str(found.value)


def test_what_cannot_be_learnt_is_refused_in_a_line(tmp_path: Path) -> None:
    need_speech()
    alone = tmp_path / "alone"
    alone.mkdir()
    write_wav(alone / "0.wav", tones("ab", 1))
    assert "holds no folder of recordings" in refused(labelled(tmp_path, f"data.paths=[{alone}]"))
    one = tmp_path / "one"
    (one / "only").mkdir(parents=True)
    write_wav(one / "only" / "0.wav", tones("ab", 1))
    assert "every sample has the class 'only'" in refused(labelled(tmp_path, f"data.paths=[{one}]"))
    assert "also has a class 'mixed'" in refused(labelled(tmp_path, "data.classes=[high,low]"))
    for words, said in (
        (("model.config.layerdrop=0.1",), "use model.config.layerdrop=0.0"),
        (("strategy=pp", "trainer.devices=2"), "strategy.pp"),
        (("model.type=hubert", "strategy=tp", "trainer.devices=2"), "hubert"),
        (("data=spoken_digits",), "data=audio_folder, data=labelled_audio_list"),
        (("objective=ctc",), "objective=sound_classification"),
        (("peft=lora",), "such as [projector.*,classifier.*]"),
    ):
        assert said in refused(labelled(tmp_path, *words)), words


@pytest.mark.parametrize("kind", ["short", "empty", "text"])
def test_a_bad_recording_is_named_or_left_out(tmp_path: Path, kind: str) -> None:
    need_speech()
    labelled(tmp_path)
    bad = tmp_path / "sounds" / "low" / "bad.wav"
    write_wav(bad, tones("a", 5)[:260])
    if kind != "short":
        bad.write_bytes(b"" if kind == "empty" else b"This is no sound.\n" * 20)
    wide = ("model.config.conv_kernel=[40,20]", "model.config.conv_stride=[20,10]", "data.speed=0.1")
    said = {"short": "the model needs", "empty": "is empty", "text": "is no sound"}[kind]
    with pytest.raises(DataError, match=rf"bad\.wav.*{said}"):
        prepare(labelled(tmp_path, *wide))
    skipped: Any = prepare(labelled(tmp_path, *wide, "data.on_bad_sample=skip"))
    assert skipped.bad_samples == 1 and skipped.train_samples + skipped.held_out_samples == 30


run = partial(small_runs.run, labelled)


@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy_is_evaluated_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_speech()
    from transformers import pipeline

    from mgpu_pipe.cli.main import main
    from mgpu_pipe.inference.open import load_run

    metrics = small_runs.run_moved(labelled, tmp_path, "val/accuracy")
    check_evaluated(
        tmp_path / "second", capsys, f"{metrics['val/loss']:.6f} nats a sample", f"{100 * metrics['val/accuracy']:.2f}%"
    )
    assert main(["export", str(tmp_path / "second"), "--out", str(tmp_path / "out")]) == 0
    classify = pipeline("audio-classification", str(tmp_path / "out"))
    wave = heard(next((tmp_path / "sounds" / "mixed").iterdir()))
    answers = classify({"raw": wave, "sampling_rate": RATE}, top_k=3, function_to_apply="none")
    config = labelled(tmp_path)
    model = load_run(tmp_path / "second").model
    from mgpu_pipe.data.audio.listen import Sound

    values = torch.from_numpy(Sound.from_config(config.data, config.model).standardise(wave))[None]  # type: ignore[arg-type]
    with torch.no_grad():
        logits = model(input_values=values).logits[0].tolist()
    assert {answer["label"]: answer["score"] for answer in answers} == pytest.approx(
        dict(zip(["high", "low", "mixed"], logits, strict=True)), abs=1e-5
    )
    check_trained_on(labelled, tmp_path, metrics, 1)


@pytest.mark.slow
def test_tags_are_exported_and_a_pipeline_gives_their_probabilities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_speech()
    from transformers import pipeline

    from mgpu_pipe.cli.main import main
    from mgpu_pipe.inference.open import load_run

    given = ("model=ast_tiny", "data.sampling_rate=16000", "strategy=ddp")
    metrics = small_runs.run(tagged, tmp_path / "tags", 2, *given)
    assert 0 <= metrics["val/exact_match"] <= metrics["val/f1"] <= 1
    assert main(["eval", str(tmp_path / "tags"), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert f"{100 * metrics['val/f1']:.2f}%" in printed and "most often taken for" in printed
    assert main(["export", str(tmp_path / "tags"), "--out", str(tmp_path / "out")]) == 0
    classify = pipeline("audio-classification", str(tmp_path / "out"))
    config = tagged(tmp_path, *given)
    samples: Any = prepare(config).open(config, "validation")
    wave = samples.recording(0)
    answers = classify({"raw": wave, "sampling_rate": 16000}, top_k=2)
    batch = SoundTaggingObjective.samples(config, samples).batch(np.array([0]), np.array([-1]))
    with torch.no_grad():
        shares = load_run(tmp_path / "tags").model(input_values=batch["input_values"]).logits[0].sigmoid().tolist()
    assert {answer["label"]: answer["score"] for answer in answers} == pytest.approx(
        dict(zip("ab", shares, strict=True)), abs=1e-5
    )


@pytest.mark.slow
def test_four_steps_of_the_experiment(cache: Path, tmp_path: Path) -> None:
    need_speech("espeak-ng")
    sizes = ("data.recordings=40", "data.validation_max_samples=20", "data.global_batch_size=4")
    _, summary, report = four_steps(cache, tmp_path, "sound_digits", *sizes, "data.micro_batch_size=2")
    assert summary["model"]["class"] == "Wav2Vec2ForSequenceClassification"
    assert np.array(summary["found"]["confusion"]).sum() == 20
    assert 0 < len(summary["samples"]) <= 12 and "Confusion" in report
    assert report.count('src="data:audio/ogg;base64,T2dnU') >= len(summary["samples"])
