"""Speech recognition. Oracle: transformers' own model on one recording at a time, without padding, in one process."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mgpu_pipe.architectures.family import Frames
from mgpu_pipe.architectures.find import families_in_role
from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.audio.recordings import Spans, random_of_spans
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.data.sources.demo.spoken_digits import check_programs
from mgpu_pipe.errors import BadInputError, ConfigErrors, DataError
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.fields import config_fields
from mgpu_pipe.objectives.ctc import CTCObjective
from mgpu_pipe.objectives.sound_inputs import SpecAugment
from mgpu_pipe.objectives.transcript_keys import count_errors, transcribe
from tests.objectives.harness import check_alone, check_evaluated, check_logits, check_trained_on, exported_model
from tests.support import small_runs
from tests.support.command import mgpu
from tests.support.needs import need_speech
from tests.support.sampling import one_in
from tests.support.sounds import RATE, list_of_tones, run_speech_experiment, tones, write_wav

SPEECH = ("objective=ctc", "data=spoken_digits", "model=wav2vec2_tiny", "logger=none", "trainer.progress=off")
FIELDS = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"conv_dim": [16, 16], "conv_kernel": [10, 4], "conv_stride": [5, 4]},
    **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "vocab_size": 12, "pad_token_id": 0},
    **{"mask_time_prob": 0.2, "mask_time_length": 3, "mask_time_min_masks": 1},
    **{"mask_feature_prob": 0.2, "mask_feature_length": 4},
    **dict.fromkeys(("layerdrop", "hidden_dropout", "attention_dropout", "activation_dropout"), 0.0),
    **{"feat_proj_dropout": 0.0, "final_dropout": 0.0},
}


def made(family: str, **fields: Any) -> torch.nn.Module:
    known = config_fields(family) or set()
    config = {name: value for name, value in {**FIELDS, **fields}.items() if name in known}
    return materialise(build_meta(ModelConfig(type=family, config=config), "AutoModelForCTC"), 1, "cpu").train()


@pytest.mark.parametrize("norm", ["group", "layer"])
@pytest.mark.parametrize("family", families_in_role("waveform_encoder"))
def test_loss_and_gradients_are_those_of_recordings_alone(family: str, norm: str) -> None:
    layered = {"feat_extract_norm": norm, "do_stable_layer_norm": norm == "layer"}
    check_alone(CTCObjective(made(family, **layered), None, lambda step: 1.0), made(family, **layered))


def test_gradients_of_long_recordings_are_those_of_float64() -> None:
    """Of 700 frames and a model that knows nothing, in float32 they would be off by 1e-4."""
    objective = CTCObjective(made("wav2vec2"), None, lambda step: 1.0)
    generator = torch.Generator().manual_seed(4)
    lengths = torch.tensor([14000, 9000])
    batch = {
        "input_values": torch.randn(2, 14000, generator=generator),
        "lengths": lengths,
        "between_words": torch.ones(2, dtype=torch.int64),
        "labels": torch.randint(1, 12, (2, 40), generator=generator),
        **SpecAugment.from_fields(objective.model.config.to_dict()).draw_masks(lengths.tolist(), [0, 1], 3),  # type: ignore[union-attr, operator]
    }
    kept: list[torch.Tensor] = []
    objective.model.lm_head.register_forward_hook(lambda *given: kept.append(given[-1]) or given[-1].retain_grad())  # type: ignore[operator, union-attr, func-returns-value]
    objective.micro_batch_loss(batch).backward()  # type: ignore[no-untyped-call]
    logits = kept[0].detach().double().requires_grad_()
    frames = Frames.from_fields(FIELDS).num_frames(lengths)
    shares = logits.log_softmax(-1).transpose(0, 1)
    torch.nn.functional.ctc_loss(shares, batch["labels"], frames, torch.tensor([40, 40]), reduction="sum").backward()  # type: ignore[no-untyped-call]
    assert kept[0].grad is not None and logits.grad is not None
    assert float((kept[0].grad - logits.grad).norm() / logits.grad.norm()) < 1e-6


@pytest.mark.parametrize(
    ("places", "spans"),
    [(90, Spans(0.3, 6, 0)), (40, Spans(0.05, 10, 2)), (25, Spans(0.02, 4, 0)), (9, Spans(1, 5, 3))],
)
def test_hidden_spans_are_as_long_and_as_many_as_those_of_transformers(places: int, spans: Spans) -> None:
    """SpecAugment (arXiv:1904.08779): spans lie inside the recording and hide at most their share of it, rounded up."""
    from transformers.models.wav2vec2.modeling_wav2vec2 import _compute_mask_indices

    np.random.seed(0)
    settings = ((1, places), spans.share, spans.length, None, spans.fewest)
    theirs = np.concatenate([_compute_mask_indices(*settings) for _ in range(2000)])
    ours = np.stack([spans.draw_mask(places, random_of_spans(7, number)) for number in range(2000)])
    most = max(np.ceil(spans.share * places / spans.length), spans.fewest) * spans.length
    assert ours.sum(1).max() == theirs.sum(1).max() <= most and abs(ours.mean() - theirs.mean()) < 0.01
    for hidden in ours:
        starts, ends = np.flatnonzero(np.diff([False, *hidden, False])).reshape(-1, 2).T
        assert (ends - starts >= spans.length).all(), "no span is cut"
    assert np.abs(ours.mean(0) - theirs.mean(0)).max() < 0.06, "each place is hidden as often"
    again, other = (
        np.stack([spans.draw_mask(places, random_of_spans(seed, number)) for number in range(50)]) for seed in (7, 8)
    )
    assert np.array_equal(again, ours[:50]) and not np.array_equal(other, ours[:50]), "keyed by seed and sample"


def test_a_norm_that_looks_at_padding_is_found() -> None:
    objective, plain = CTCObjective(made("wav2vec2"), None, lambda step: 1.0), made("wav2vec2")
    batch = objective.random_batch(3, 0, 4, 0, packed=False)
    whole = float(objective.micro_batch_loss(batch))
    norm: Any = objective.model.base_model.feature_extractor.conv_layers[0].layer_norm  # type: ignore[operator, union-attr]
    norm.__class__ = torch.nn.GroupNorm
    assert abs(float(objective.micro_batch_loss(batch)) - whole) > 1e-4 * whole
    with torch.no_grad():
        reference = objective.reference_loss(lambda **inputs: plain(**inputs), plain, batch).loss_sum  # type: ignore[arg-type]
    assert float(reference) == pytest.approx(whole, rel=1e-6)


def test_wrong_words_and_characters_are_counted() -> None:
    need_speech()
    said, heard = transcribe([5, 6, 2, 7, 7, 2, 8], 2), transcribe([0, 5, 5, 0, 2, 2, 7, 0, 7, 0], 2, blank=0)
    assert len(said.split()) == 3 and heard.split()[1] == said.split()[1]
    # One word misheard, one not heard at all; one character of the first, and a space and one of the last are missing.
    assert count_errors([(said, heard)]) == (2, 3, 3, 7)
    assert count_errors([(said, said), (said, "")]) == (3, 6, 7, 14) and count_errors([]) == (0, 0, 0, 0)


def listed(folder: Path, *overrides: str) -> RunConfig:
    """Tones of a list."""
    if not (folder / "spoken.csv").exists():
        list_of_tones(folder)
    given = (
        f"data.paths=[{folder / 'spoken.csv'}]",
        f"data.cache_dir={folder / 'cache'}",
        f"data.sampling_rate={RATE}",
    )
    more = ("trainer.max_steps=4", "data.validation_fraction=0.2", "data.global_batch_size=8", "data.sort_steps=2")
    changes = ("data.speed=0.1", "data.noise=0.05")
    return compose([*SPEECH, "data=audio_list", *given, *more, *changes, *overrides])[0]


run = partial(small_runs.run, listed)


@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy_is_evaluated_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_speech()
    from transformers import Wav2Vec2ForCTC, Wav2Vec2Processor

    metrics = small_runs.run_moved(listed, tmp_path, "val/character_error_rate")
    check_evaluated(
        tmp_path / "second",
        capsys,
        f"{metrics['val/loss']:.6f} nats a character",
        f"{100 * metrics['val/word_error_rate']:.2f}%",
    )
    exported = exported_model(tmp_path / "second", Wav2Vec2ForCTC, capsys)
    processor: Any = Wav2Vec2Processor.from_pretrained(tmp_path / "out")
    wave = tones("ab", 99)
    values = processor(wave, sampling_rate=RATE, return_tensors="pt").input_values
    config = listed(tmp_path)
    assert processor.tokenizer("b ab").input_ids == prepare(config).alphabet().encode("b ab")  # type: ignore[attr-defined]
    assert torch.allclose(values[0].mean(), torch.zeros(()), atol=1e-5)
    check_logits(tmp_path / "second", exported, input_values=values)
    check_trained_on(listed, tmp_path, metrics, 2, "strategy=ddp")


def test_samples_are_the_same_on_any_processes_and_read_from_json(tmp_path: Path) -> None:
    need_speech()
    config = listed(tmp_path, "data.validation_fraction=0.25")
    prepared = read_prepared(json.loads(json.dumps(prepare(config).as_dict())))
    assert prepared.train_samples + prepared.held_out_samples == 40 and prepared.held_out_samples == 10  # type: ignore[attr-defined]
    samples = CTCObjective.samples(config, prepared.open(config, "train"))
    order = prepared.order(config.seed, config.data, len(samples))
    places = order.indices(0, 90)
    assert set(places.tolist()) == set(range(30))
    assert order.indices(21, 30).tolist() == places[21:51].tolist(), "a pure function of the place"
    numbers = np.arange(8)
    together, alone = samples.batch(places[:8], numbers), samples.batch(places[3:4], numbers[3:4])
    for name, value in alone.items():
        assert torch.equal(
            together[name][3:4, ..., : value.shape[-1]] if value.dim() > 1 else together[name][3:4], value
        ), name
    assert alone["hidden_frames"].any() and not torch.equal(
        samples.batch(places[3:4], numbers[3:4] + 1000)["input_values"][0, :1000], alone["input_values"][0, :1000]
    )
    held = CTCObjective.samples(config, prepared.open(config, "validation")).batch(numbers[:2], -1 - numbers[:2])
    assert not held["hidden_frames"].any()
    lengths = np.load(prepared.folder / "lengths.npy")[prepared.indices("train")]  # type: ignore[attr-defined]
    unsorted = listed(tmp_path, "data.validation_fraction=0.25", "data.sort_steps=1")
    drawn = prepare(unsorted).order(unsorted.seed, unsorted.data, 30)
    apart = [np.ptp(lengths[one[:80].reshape(10, 8)], axis=1).sum() for one in (places, drawn.indices(0, 80))]
    assert apart[0] < 0.7 * apart[1], "recordings of a step are about as long as one another"


def broken(folder: Path, kind: str) -> str:
    """A recording that cannot be used, or is used in a way of its own; its text."""
    path, wave = folder / "bad.wav", tones("ab", 1)
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("This is no sound.\n" * 20)
    elif kind == "silent":
        write_wav(path, wave[:0])
    elif kind == "long":
        write_wav(path, np.tile(wave, 40))
    elif kind == "stereo":
        write_wav(path, np.stack([wave, -0.5 * wave], 1).reshape(-1), channels=2)
    elif kind == "clipped":
        write_wav(path, np.clip(50 * wave, -1, 1))
    elif kind == "hush":
        write_wav(path, 0 * wave)
    elif kind == "rate":
        write_wav(path, tones("ab", 1, 22050), 22050)
    else:
        write_wav(path, wave)
        if kind == "cut":
            path.write_bytes(path.read_bytes()[:-2000])
    return {"label": "ab" * 40, "unknown": "a!b", "blank": "   "}.get(kind, "ab")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("empty", "is empty"),
        pytest.param("text", "is no sound that can be read", marks=pytest.mark.exhaustive),
        pytest.param("silent", "fewer than a word takes", marks=pytest.mark.exhaustive),
        pytest.param("long", "lasts 16.0 s, longer than data.max_seconds=10", marks=pytest.mark.exhaustive),
        ("cut", "is cut short"),
        ("label", "has a text that needs 80 frames; the recording has"),
        pytest.param("blank", "has no text", marks=pytest.mark.exhaustive),
        ("unknown", "has '!' in its text, which the model's alphabet has not"),
        pytest.param("clipped", "", marks=pytest.mark.exhaustive),
        ("hush", ""),
        ("stereo", ""),
        pytest.param("rate", "", marks=pytest.mark.exhaustive),
    ],
)
def test_a_bad_recording_is_named_or_left_out_and_others_are_read(tmp_path: Path, kind: str, said: str) -> None:
    need_speech()
    known = prepare(listed(tmp_path)).tokenizer_folder
    with open(tmp_path / "spoken.csv", "a") as file:
        file.write(f"bad.wav,{broken(tmp_path, kind)}\n")
    given = (
        "data.max_seconds=10",
        "data.speed=0",
        "data.noise=0",
        "data.validation_fraction=0",
        f"data.tokenizer={known}",
    )
    if said:
        with pytest.raises(DataError, match=r"bad\.wav|spoken\.csv:42") as found:
            prepare(listed(tmp_path, *given))
        assert said in str(found.value) and "data.on_bad_sample=skip" in str(found.value)
        assert prepare(listed(tmp_path, *given, "data.on_bad_sample=skip")).train_samples == 40
        return
    config = listed(tmp_path, *given)
    samples = prepare(config).open(config, "train")
    heard = samples.batch(np.array([40]), np.array([0]))
    assert heard["lengths"].tolist() == [2 * (RATE // 5)], "one channel of the model's rate"
    if kind in ("clipped", "hush"):
        assert bool(heard["input_values"].isfinite().all()), "it is used as it is"
        return
    plain = torch.from_numpy(tones("ab", 1))
    assert torch.corrcoef(torch.stack([plain, heard["input_values"][0]]))[0, 1] > 0.97


def test_moved_recordings_are_the_same_data(tmp_path: Path) -> None:
    """The digest is of what recordings hold and say: a run resumes on another machine, with other folders."""
    (tmp_path / "here").mkdir()
    before = prepare(listed(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "there")
    after = prepare(listed(tmp_path / "there"))
    assert before.digest == after.digest and before.folder != after.folder  # type: ignore[attr-defined]


def test_held_out_recordings_with_strange_characters_count(tmp_path: Path) -> None:
    """The alphabet is that of the training texts; what others say beyond it is heard wrong, not left out."""
    need_speech()
    write_wav(tmp_path / "new.wav", tones("a!b", 1))
    (tmp_path / "new.csv").write_text("path,text\nnew.wav,a!b a\n0.wav,ab\n")
    config = listed(tmp_path, f"data.validation_paths=[{tmp_path / 'new.csv'}]")
    prepared: Any = prepare(config)
    assert prepared.held_out_samples == 2 and prepared.bad_samples == 0 and "1 of 2 held-out texts" in prepared.told
    batch = prepared.open(config, "validation").batch(np.arange(2), -1 - np.arange(2))
    alphabet = prepared.alphabet()
    said = [label for label in batch["labels"][0].tolist() if label >= 0]
    assert alphabet.decode(said) == "a\ufffdb a"
    heard = [alphabet.numbers[name] for name in "ab|a"]
    assert count_errors([(transcribe(said, alphabet.between_words), transcribe(heard, alphabet.between_words))]) == (
        1,
        2,
        1,
        5,
    )
    with open(tmp_path / "spoken.csv", "a") as file:
        file.write("new.wav,a!b\n")
    given = (f"data.tokenizer={prepared.tokenizer_folder}", "data.on_bad_sample=skip", "data.validation_fraction=0.5")
    both: Any = prepare(listed(tmp_path, *given))
    assert both.train_samples + both.held_out_samples + both.bad_samples == 41
    assert len(both.unlearnable()) == both.bad_samples, "what is trained on has to be written in the alphabet"


@pytest.mark.parametrize(
    ("lines", "overrides", "said"),
    one_in(
        2,
        [
            (["path,words", "0.wav,b"], (), "data.text_column"),
            (["path,text", "gone.wav,b"], (), "there is no file"),
            (["path,text,offset,duration", "0.wav,b,0.5,1"], (), "is a part of its file (offset 0.5, duration 1)"),
            (["path,text", "0.wav,"], (), "has no text"),
            (["path,text", "0.wav,ab"], ("model.config.layerdrop=0.1",), "use model.config.layerdrop=0.0"),
            (["path,text", "0.wav,ab"], ("strategy=pp", "trainer.devices=2"), "objective.name=ctc"),
            (["path,text", "0.wav,ab"], ("model=llama_tiny",), "llama"),
            (["path,text", "0.wav,ab"], ("data.speed=0.9",), "data.speed=0.9"),
            (["path,text", "0.wav,ab"], ("peft=lora",), "use peft.train_also=[lm_head.*]"),
        ],
    ),
)
def test_bad_input_is_told_before_the_run(
    tmp_path: Path, lines: list[str], overrides: tuple[str, ...], said: str
) -> None:
    need_speech()
    write_wav(tmp_path / "0.wav", tones("ab", 1))
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    given = (f"data.paths=[{tmp_path / 'list.csv'}]", f"data.cache_dir={tmp_path / 'cache'}")
    with pytest.raises(BadInputError, match=re.escape(said)):
        preflight(compose([*SPEECH, "data=audio_list", *given, *overrides])[0], elsewhere=True)


@pytest.mark.slow
def test_four_steps_of_the_experiment(cache: Path, tmp_path: Path) -> None:
    need_speech("espeak-ng", "flite")
    folder = run_speech_experiment(cache, tmp_path, "wav2vec2_spoken_digits", "Wav2Vec2ForCTC")
    told = mgpu(cache, tmp_path, "eval", str(folder), "data.held_out=synthesiser", "--device", "cpu")
    assert "word_error_rate" in told and "of 6 held-out samples" in told


def test_missing_programs_and_packages_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for package in ("soundfile", "jiwer"):
        monkeypatch.setitem(sys.modules, package, None)
    config = compose([*SPEECH, "data.held_out=synthesiser"])[0]
    with pytest.raises(ConfigErrors) as found:
        check_programs(config.model, config.data)
    told = [str(error) for error in found.value.errors]
    assert len(told) == 3 and "apt-get install espeak-ng" in told[1] and "apt-get install flite" in told[2]
    told += [str(error) for error in config.objective.data_errors(config.data, config.model)]
    assert all("pip install 'mgpu_pipe[audio]'" in line for line in (told[0], told[3]))


def test_the_shipped_model_has_its_published_size() -> None:
    """95 million, as the paper gives it: 94.4 with a head of 32 characters."""
    model = build_meta(compose(["model=wav2vec2_base"])[0].model, "AutoModelForCTC")
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(94.4, rel=2e-3)


@pytest.mark.parametrize(
    ("columns", "whole", "part"),
    [("offset,duration", "0,1.0", "0.0,0.5"), ("start,end", "30,31.0", "0,.5"), ("offset,duration", ",", ",0.5")],
)
def test_a_row_of_a_part_of_its_recording_is_a_bad_sample(tmp_path: Path, columns: str, whole: str, part: str) -> None:
    """NeMo's manifests begin a part at 0 too; UrbanSound8K's slices are files, which keep the times they had."""
    need_speech()
    for number in range(3):
        write_wav(tmp_path / f"{number}.wav", tones("ab ab", number))
    rows = [f"{number}.wav,ab ab,{whole}" for number in range(2)]

    def read(*more: str) -> Any:
        (tmp_path / "list.csv").write_text("\n".join([f"path,text,{columns}", *rows, *more]) + "\n")
        given = (f"data.paths=[{tmp_path / 'list.csv'}]", f"data.cache_dir={tmp_path / 'cache'}")
        return prepare(compose([*SPEECH, "data=audio_list", "data.validation_fraction=0", *given])[0])

    assert read().train_samples == 2
    with pytest.raises(DataError, match=r"list\.csv:4 lasts 1\.0 s, more than the 0\.5 s that its row states"):
        read(f"2.wav,a,{part}")
