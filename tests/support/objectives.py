"""Short runs of every objective: overrides that train a tiny model of its kind on small data."""

from __future__ import annotations

from pathlib import Path

from tests.objectives.test_sequence_classification import write_rows
from tests.objectives.test_sound_contrastive import folder_of_clap, list_of_captions
from tests.support.embedding_pairs import write_pairs, write_scored_pairs
from tests.support.needs import need_digits, need_speech
from tests.support.sounds import RATE, list_of_tones

TEXT = ("model=llama_tiny", "data=synthetic", "data.seq_len=64")
OBJECTIVES = {
    "causal_lm": TEXT,
    "masked_lm": ("model=bert_tiny", "objective=masked_lm", "data=synthetic", "data.seq_len=64"),
    "seq2seq": ("model=t5_tiny", "objective=seq2seq", "data=number_words"),
    "image_classification": ("model=vit_tiny", "objective=image_classification", "data=digits"),
    "contrastive": ("model=clip_tiny", "objective=contrastive", "data=captioned_digits"),
    "vision_language": ("model=llava_tiny", "objective=vision_language", "data=digit_questions"),
    "ctc": ("model=wav2vec2_tiny", "objective=ctc", "data=audio_list", f"data.sampling_rate={RATE}"),
    "speech_seq2seq": ("model=whisper_tiny", "objective=speech_seq2seq", "data=audio_list")
    + ("model.config.max_source_positions=100", "objective.max_new_tokens=9"),
    "sound_classification": ("model=wav2vec2_tiny", "objective=sound_classification", "data=labelled_audio_list")
    + (f"data.sampling_rate={RATE}",),
    "sound_tagging": ("model=wav2vec2_tiny", "objective=sound_tagging", "data=tagged_audio_list")
    + (f"data.sampling_rate={RATE}",),
    "sound_contrastive": ("model=hf", "objective=sound_contrastive", "data=captioned_audio_list", "data.seq_len=24"),
    "sequence_classification": ("model=bert_tiny", "objective=sequence_classification", "data=labelled_jsonl")
    + ("data.seq_len=24", "data.validation_fraction=0.2"),
    "text_embedding": ("model=bert_tiny", "objective=text_embedding", "data=embedding_pairs")
    + ("data.seq_len=24", "data.validation_fraction=0.2"),
    "reranker": ("model=bert_tiny", "objective=reranker", "data=embedding_pairs")
    + ("data.seq_len=24", "data.validation_fraction=0.2"),
    "text_similarity": ("model=bert_tiny", "objective=text_similarity", "data=scored_pairs")
    + ("data.seq_len=24", "data.validation_fraction=0.2"),
    "dpo": ("model=llama_tiny", "model.config.vocab_size=384", "objective=dpo", "data=spoken_preferences")
    + ("data.chat_template=chatml", "data.numbers={count: 200, digits: 3}", "data.seq_len=80"),
    "reward": ("model=llama_tiny", "model.config.vocab_size=384", "objective=reward", "data=spoken_preferences")
    + ("data.chat_template=chatml", "data.numbers={count: 200, digits: 3}", "data.seq_len=80")
    + ("model.config.pad_token_id=0",),
    "kto": ("model=llama_tiny", "model.config.vocab_size=384", "objective=kto", "data=spoken_unpaired")
    + ("data.chat_template=chatml", "data.numbers={count: 100, digits: 3}", "data.seq_len=64"),
    "cpo": ("model=llama_tiny", "model.config.vocab_size=384", "objective=cpo", "data=spoken_preferences")
    + ("data.chat_template=chatml", "data.numbers={count: 200, digits: 3}", "data.seq_len=80"),
    "simpo": ("model=llama_tiny", "model.config.vocab_size=384", "objective=simpo", "data=spoken_preferences")
    + ("data.chat_template=chatml", "data.numbers={count: 200, digits: 3}", "data.seq_len=80"),
    "orpo": ("model=llama_tiny", "model.config.vocab_size=384", "objective=orpo", "data=spoken_preferences")
    + ("data.chat_template=chatml", "data.numbers={count: 200, digits: 3}", "data.seq_len=80"),
}


def list_overrides(name: str, folder: Path, table: dict[str, tuple[str, ...]] = OBJECTIVES) -> tuple[str, ...]:
    """The overrides of ``table[name]``, with the data that they read written below ``folder``.

    Skips the test where scikit-learn or a recorder of speech is missing.
    """
    overrides = table[name]
    if "digit" in " ".join(overrides):
        need_digits()
    if "data=audio_list" in overrides:
        need_speech()
        sounds = folder / f"sounds-{name}"
        sounds.mkdir()
        return *overrides, f"data.paths=[{list_of_tones(sounds)}]"
    if {"data=labelled_audio_list", "data=tagged_audio_list"} & {*overrides}:
        need_speech()
        sounds = folder / f"sounds-{name}"
        sounds.mkdir()
        return *overrides, f"data.paths=[{list_of_tones(sounds, column='label')}]"
    if "data=captioned_audio_list" in overrides:
        need_speech()
        sounds = folder / f"sounds-{name}"
        sounds.mkdir()
        listed = f"data.paths=[{list_of_captions(sounds)}]"
        return *overrides, listed, f"model.path={folder_of_clap(folder / 'clap')}"
    if "data=embedding_pairs" in overrides:
        return *overrides, f"data.paths=[{write_pairs(folder / 'pairs.jsonl')}]"
    if "data=scored_pairs" in overrides:
        return *overrides, f"data.paths=[{write_scored_pairs(folder / 'scored.jsonl')}]"
    if "data=labelled_jsonl" in overrides:
        return *overrides, f"data.paths=[{write_rows(folder / 'rows.jsonl')}]"
    return overrides
