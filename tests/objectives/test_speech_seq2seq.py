"""Speech recognition by an encoder and a decoder. Oracle: transformers' own Whisper, one recording at a time."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.errors import BadInputError, DataError
from mgpu_pipe.models.build import materialise, run_model
from mgpu_pipe.models.speech import greedy_transcripts
from mgpu_pipe.objectives.registry import objective_class
from mgpu_pipe.objectives.transcript_keys import count_errors
from tests.objectives.harness import check_evaluated, check_logits, check_trained_on, exported_model
from tests.support import small_runs
from tests.support.needs import need_speech
from tests.support.sampling import one_in
from tests.support.sounds import list_of_tones, run_speech_experiment, tones, write_wav

WHISPER = (
    "objective=speech_seq2seq",
    "data=spoken_digits",
    "model=whisper_tiny",
    "logger=none",
    "trainer.progress=off",
)


def listed(folder: Path, *overrides: str) -> RunConfig:
    """Tones of a list."""
    if not (folder / "spoken.csv").exists():
        list_of_tones(folder)
    given = (f"data.paths=[{folder / 'spoken.csv'}]", f"data.cache_dir={folder / 'cache'}")
    more = ("trainer.max_steps=4", "data.validation_fraction=0.2", "data.global_batch_size=8", "data.sort_steps=2")
    window = ("model.config.max_source_positions=100", "objective.max_new_tokens=9", "data.max_seconds=60")
    changes = ("data.speed=0.1", "data.noise=0.05", "model.config.apply_spec_augment=true")
    return compose([*WHISPER, "data=audio_list", *given, *more, *window, *changes, *overrides])[0]


run = partial(small_runs.run, listed)


def test_words_are_counted_in_what_the_decoder_writes_by_itself(tmp_path: Path) -> None:
    need_speech()
    from transformers import WhisperFeatureExtractor

    config = listed(tmp_path)
    prepared = read_prepared(json.loads(json.dumps(prepare(config).as_dict())))
    config = prepared.complete(config)
    model: Any = materialise(run_model(config), 3, "cpu").eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():  # so that recordings are told apart, and no text is empty
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    objective = objective_class("speech_seq2seq").from_config(config, model, None, lambda step: 1.0)
    objective.of_data(prepared)
    held = objective.samples(config, prepared.open(config, "validation"))
    everything = np.arange(len(held))
    batch = held.batch(everything, -1 - everything)
    plain = WhisperFeatureExtractor.from_pretrained(prepared.tokenizer_folder)
    wave = held.read.recording(1)  # type: ignore[attr-defined]
    assert torch.equal(
        batch["input_features"][1], plain(wave, sampling_rate=16000, return_tensors="pt").input_features[0]
    ), "as the extractor in the export makes it, without what training hides"
    written = greedy_transcripts(model, batch["input_features"], 9)
    own = model.generate(batch["input_features"], max_new_tokens=9, do_sample=False)
    start = model.config.decoder_start_token_id
    for ours, theirs in zip(written, own.tolist(), strict=True):
        theirs = theirs[1:] if theirs[:1] == [start] else theirs
        assert ours[: len(theirs)] == theirs
    # The first recording's transcript becomes what the model writes: known to be right, it is not written.
    words = prepared.alphabet()  # type: ignore[attr-defined]
    batch["labels"] = torch.full((len(held), 9), IGNORE_INDEX)
    for row, text in enumerate([written[0][:9], *[words.encode("ab b")] * (len(held) - 1)]):
        batch["labels"][row, : len(text)] = torch.tensor(text)
    said = [words.decode(written[0]), *["ab b"] * (len(held) - 1)]
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    counted = count_errors([(one, words.decode(heard)) for one, heard in zip(said, written, strict=True)])
    assert objective.evaluation_sums(batch).tolist()[2:] == list(counted) and counted[0] > 0 and len(calls) == 10
    alone = {name: value[:1] for name, value in batch.items()}
    del calls[:]
    measured = objective.description.measured([*objective.evaluation_sums(alone).tolist(), 9])
    assert measured["val/accuracy"] == 1 and measured["val/character_error_rate"] == 0 and len(calls) == 1
    assert objective.evaluation_sums(objective.batch_spec.empty(9, torch.device("cpu"))).tolist() == [0.0] * 6


def test_a_spectrogram_hides_spans_by_its_sample_alone(tmp_path: Path) -> None:
    """However a batch is cut, so under any strategy and after a resume; held-out recordings hide none."""
    need_speech()
    bands = ("model.config.mask_feature_prob=0.2", "model.config.mask_feature_length=4")
    shares = ("model.config.mask_time_prob=0.2", "model.config.mask_time_length=5", *bands)
    given = (*shares, "data.speed=0", "data.noise=0", "data.validation_fraction=0.25")
    config, plain = listed(tmp_path, *given), listed(tmp_path, *given, "model.config.apply_spec_augment=false")
    opened = prepare(config).open(config, "train")
    samples, whole = (objective_class("speech_seq2seq").samples(each, opened) for each in (config, plain))
    numbers = np.arange(8)
    seen, full = (each.batch(numbers, 100 + numbers)["input_features"] for each in (samples, whole))
    alone = samples.batch(numbers[3:4], 103 + numbers[:1])["input_features"]
    assert torch.equal(alone[0], seen[3]), "keyed by sample"
    assert not torch.equal(samples.batch(numbers[3:4], 903 + numbers[:1])["input_features"][0], seen[3])
    hidden = seen != full
    assert not seen[hidden].any()
    for row in hidden:
        times, features = row.float().mean(0), row.float().mean(1)
        assert 0 < int((times > 0.9).sum()) <= np.ceil(0.2 * row.shape[1]) and 4 <= int((features > 0.4).sum()) <= 8
    held, known = (each.batch(numbers, -1 - numbers)["input_features"] for each in (samples, whole))
    assert torch.equal(held, known)


@pytest.mark.exhaustive  # the runs of test_ctc.py are alike
def test_a_run_goes_on_under_another_strategy_is_evaluated_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_speech()
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    from mgpu_pipe.cli.main import main

    whole, metrics, saved = small_runs.run_on(listed, tmp_path)
    third = run(tmp_path / "third", 2, "strategy=zero3", resume=saved)
    for key in ("train/loss", "val/loss"):
        assert [metrics[key], third[key]] == pytest.approx([whole[key]] * 2, rel=1e-5), "changed and hidden alike"
    rates = [one["val/character_error_rate"] for one in (whole, metrics, third)]
    assert rates[0] == rates[1] == rates[2]
    check_evaluated(
        tmp_path / "second",
        capsys,
        f"{metrics['val/loss']:.6f} nats a token",
        f"{100 * metrics['val/word_error_rate']:.2f}%",
    )
    exported = exported_model(tmp_path / "second", WhisperForConditionalGeneration, capsys)
    processor: Any = WhisperProcessor.from_pretrained(tmp_path / "out")
    inputs = processor(tones("ab", 99, 16000), sampling_rate=16000, return_tensors="pt")
    words = prepare(listed(tmp_path)).alphabet()  # type: ignore[attr-defined]
    ids = processor.tokenizer("b ab").input_ids
    assert ids[1:] == words.encode("b ab")[-len(ids[1:]) :] and ids[0] == exported.config.decoder_start_token_id
    before = torch.tensor([[1, 80, 81]])
    given = {"input_features": inputs.input_features, "decoder_input_ids": before}
    check_logits(tmp_path / "second", exported, **given)
    assert main(["generate", str(tmp_path / "second"), "--prompt", "one", "--device", "cpu"]) == 2
    assert "hears recordings and continues no text; use mgpu-pipe eval" in capsys.readouterr().err
    check_trained_on(listed, tmp_path, metrics, 2, "strategy=ddp")


def test_samples_are_the_same_on_any_processes_and_what_is_hidden_is_keyed(tmp_path: Path) -> None:
    need_speech()
    config = listed(tmp_path)
    prepared = prepare(config)
    samples = objective_class("speech_seq2seq").samples(config, prepared.open(config, "train"))
    places, numbers = prepared.order(config.seed, config.data, len(samples)).indices(0, 8), np.arange(8)
    together, alone = samples.batch(places, numbers), samples.batch(places[3:4], numbers[3:4])
    assert torch.equal(together["input_features"][3:4], alone["input_features"])
    length = alone["labels"].shape[1]
    assert torch.equal(together["labels"][3:4, :length], alone["labels"])
    assert samples.valid_units(places, numbers) == int((together["labels"] != IGNORE_INDEX).sum())
    other = samples.batch(places[3:4], numbers[3:4] + 1000)["input_features"]
    assert not torch.equal(other, alone["input_features"])
    hidden = (alone["input_features"][0] == 0).all(0)
    assert hidden.any() and not hidden[length * 100 :].any(), "spans of frames of the recording itself"
    whole = samples.batch(places[3:4], -1 - numbers[:1])["input_features"]
    assert not (whole[0] == 0).all(0).any()


@pytest.mark.parametrize(
    ("line", "overrides", "said"),
    one_in(
        2,
        [
            ("long.wav,b", (), "lasts 3.0 s; the model's window has 2 s"),
            ("0.wav," + "b a " * 40, (), "tokens; the model writes at most 64"),
            ("0.wav,ab", ("model.config.max_source_positions=110",), "use a multiple of 50"),
            ("0.wav,ab", ("model.config.vocab_size=100",), "use at least 258"),
            ("0.wav,ab", ("model.config.decoder_layerdrop=0.1",), "use model.config.decoder_layerdrop=0.0"),
            ("0.wav,ab", ("model.config.decoder_attention_heads=8",), "use 4, as the encoder"),
            ("0.wav,ab", ("strategy=pp", "trainer.devices=2"), "strategy.pp=2"),
            ("0.wav,ab", ("model=wav2vec2_tiny",), "wav2vec2"),
            ("0.wav,ab", ("objective=ctc",), "objective=speech_seq2seq"),
        ],
    ),
)
def test_bad_input_is_told_before_the_run(tmp_path: Path, line: str, overrides: tuple[str, ...], said: str) -> None:
    need_speech()
    write_wav(tmp_path / "0.wav", tones("ab", 1))
    write_wav(tmp_path / "long.wav", tones("ab" * 8, 1)[: 3 * 8000])
    (tmp_path / "list.csv").write_text(f"path,text\n{line}\n")
    given = (f"data.paths=[{tmp_path / 'list.csv'}]", f"data.cache_dir={tmp_path / 'cache'}")
    own = () if "model=wav2vec2_tiny" in overrides else ("model.config.max_source_positions=100",)
    with pytest.raises((BadInputError, DataError), match=re.escape(said)):
        config = compose([*WHISPER, "data=audio_list", *given, *own, *overrides])[0]
        preflight(config, elsewhere=True)
        prepare(config)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_four_steps_of_the_experiment(cache: Path, tmp_path: Path) -> None:
    need_speech("espeak-ng")
    run_speech_experiment(cache, tmp_path, "whisper_spoken_digits", "WhisperForConditionalGeneration")


def test_an_evaluation_writes_no_more_than_the_decoder_has_positions() -> None:
    """The key's default is 64 tokens; a small model may have fewer positions."""
    config = compose(["model=whisper_tiny", "objective=speech_seq2seq", "data=spoken_digits"])[0]
    model: Any = materialise(run_model(config), 3, "cpu").eval()
    model.config.eos_token_id = -1  # which it never writes
    most = int(model.config.max_target_positions)
    features = torch.zeros(2, model.config.num_mel_bins, 2 * model.config.max_source_positions)
    written = greedy_transcripts(model, features, most + 20)
    assert [len(tokens) for tokens in written] == [most, most]
