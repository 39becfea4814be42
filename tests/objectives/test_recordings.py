"""Recordings in conversations. Oracle: transformers' own processor and model, one conversation at a time."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import BPE

from mgpu_pipe.architectures.family import second_tokens, sound_tokens
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.audio import synthesis
from mgpu_pipe.data.audio.chat_sounds import chat_window
from mgpu_pipe.data.audio.decode_audio import decode
from mgpu_pipe.data.audio.log_mel import LogMel
from mgpu_pipe.data.images.pixels import vision_field
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.data.sources.demo import spoken_digits
from mgpu_pipe.data.text.conversations import as_parts
from mgpu_pipe.data.text.cut_texts import TurnEncoder
from mgpu_pipe.data.text.preview import parts_of
from mgpu_pipe.data.text.render_chat import ChatTemplate
from mgpu_pipe.data.text.tokenizer_folder import plain_tokenizer
from mgpu_pipe.errors import BadInputError, ConfigError, DataError, printable
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.fields import check_model_config
from mgpu_pipe.models.weights.pretrained import load_pretrained
from mgpu_pipe.objectives.patch_pictures import build_picture_inputs
from tests.objectives.contracts import VARIANTS
from tests.objectives.harness import check_trained_on, exported_model
from tests.objectives.test_vision_language import CLASS
from tests.support import pictures, small_runs
from tests.support.command import four_steps, mgpu
from tests.support.needs import need_speech
from tests.support.pictures import said
from tests.support.sampling import sampled
from tests.support.sounds import tones, write_wav
from tests.support.vision_folders import model_inputs, omni_fields, prepared_by_maker, write_folder

GIVEN = ("objective=vision_language", "model=qwen2_audio_tiny", "logger=none", "trainer.progress=off")
WORDS = ("ab", "cabba", "bccab", "a")
HEARD = (["ab"], ["cabba"], ["bccab"], ["a"], ["ab", "cabba"], [])


def part(name: str) -> dict[str, str]:
    return {"type": "audio", "audio": f"{name}.wav"}


def write_chats(folder: Path) -> None:
    """Conversations with no recording, one or two, of four lengths."""
    for number, word in enumerate(WORDS):
        write_wav(folder / f"{word}.wav", tones(word, number)[37 * number :])
    rows = []
    for names in HEARD:
        question = [*map(part, names), {"type": "text", "text": "What is said?"}]
        rows.append({"messages": said(question, " and ".join(names) or "nothing")})
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def chats(folder: Path, *overrides: str) -> RunConfig:
    if not (folder / "chats.jsonl").is_file():
        write_chats(folder)
    overrides = tuple(word for word in overrides if word != OMNI or "model=hf" not in overrides)
    names_model = any(word.startswith("model=") for word in overrides)
    chosen = [word for word in GIVEN if not (names_model and word.startswith("model="))]
    given = ("data=picture_chats", f"data.paths=[{folder / 'chats.jsonl'}]", f"data.cache_dir={folder / 'cache'}")
    more = ("data.chat_template=chatml", "data.seq_len=200", "data.validation_fraction=0.4", "data.num_workers=0")
    steps = ("trainer.max_steps=4", "data.global_batch_size=4")
    return compose([*chosen, *given, *more, *steps, *overrides])[0]


run = partial(small_runs.run, chats)


def test_ids_and_spectrograms_are_those_of_transformers_processor(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, Qwen2AudioProcessor, WhisperFeatureExtractor

    config = chats(tmp_path, "data.validation_fraction=0")
    prepared: Any = read_prepared(json.loads(json.dumps(prepare(config).as_dict())))
    samples, every = prepared.open(config, "train"), np.arange(len(HEARD))
    batch = samples.batch(every, every)
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
    extractor = WhisperFeatureExtractor(**prepared.window.settings())
    processor = Qwen2AudioProcessor(extractor, tokenizer, chat_template="", audio_token="<audio>")
    for row, names in enumerate(HEARD):
        waves = [decode((tmp_path / f"{name}.wav").read_bytes(), 16000, 60) for name in names]
        turns = said("<audio>" * len(names) + "What is said?", " and ".join(names) or "nothing")
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        made = processor(text=text, audio=waves or None, sampling_rate=16000, return_tensors="pt")
        ids = made["input_ids"][0]
        assert torch.equal(batch["input_ids"][row][: len(ids)], ids)
        assert (batch["recordings"][row] > 0).sum() == len(names)
        for place in range(len(names)):
            assert batch["recordings"][row][place] == made["feature_attention_mask"][place].sum()
            assert torch.allclose(batch["input_features"][row][place], made["input_features"][place], atol=1e-5)
    texts = ["".join(part.text for part in row) for row in parts_of(prepared, samples, every, every, True)]
    assert [text.count("<audio>") for text in texts] == list(map(len, HEARD)), "as people are shown them"


def test_a_filled_window_is_that_of_voxtral_s_processor(tmp_path: Path) -> None:
    from transformers import VoxtralProcessor, WhisperFeatureExtractor

    config = chats(tmp_path, "model=voxtral_tiny", "data.validation_fraction=0")
    prepared: Any = read_prepared(json.loads(json.dumps(prepare(config).as_dict())))
    samples, every = prepared.open(config, "train"), np.arange(len(HEARD))
    batch, extractor = samples.batch(every, every), WhisperFeatureExtractor(**prepared.window.settings())
    settings: dict[str, Any] = {"sampling_rate": 16000, "padding": True, "truncation": False, "return_tensors": "pt"}
    for row, names in enumerate(HEARD):
        waves = [decode((tmp_path / f"{name}.wav").read_bytes(), 16000, 60) for name in names]
        assert (batch["input_ids"][row] == prepared.audio_token_id).sum() == 50 * len(names)
        if waves:
            made = VoxtralProcessor._retrieve_input_features(
                SimpleNamespace(feature_extractor=extractor), waves, 400, pad_to_multiple_of=64000, **settings
            )
            assert torch.allclose(batch["input_features"][row][: len(names)], made, atol=1e-5)
    texts = ["".join(part.text for part in row) for row in parts_of(prepared, samples, every, every, True)]
    assert [text.count("<audio>") for text in texts] == list(map(len, HEARD)), "as people are shown them"


def test_only_seconds_are_read_alone(tmp_path: Path) -> None:
    words = (OMNI, *VARIANTS["@omni3"].split(), "model.config.audio_config.n_window=40")
    with pytest.raises(ConfigError, match=r"n_window=40: .*13 tokens.*use 50"):
        prepare(chats(tmp_path, *words))


def test_settings_that_came_later_change_no_digest_of_older_data() -> None:
    older = {"bins": 80, "rate": 16_000, "seconds": 30, "hop": 160, "width": 400, "most_tokens": 448}
    assert LogMel(80, 16_000, 30).identity() == older
    assert LogMel(80, 16_000, 30, fixed=False, filled=4).identity() == {**older, "fixed": False, "filled": 4}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [("strategy=zero3",), ("strategy=pp", "trainer.devices=2")], ids=" ".join)
def test_a_run_trains_and_resumes_under_another_strategy(tmp_path: Path, words: tuple[str, ...]) -> None:
    metrics = small_runs.run_moved(chats, tmp_path)
    other = small_runs.run(chats, tmp_path / "other", 2, *words)
    assert other["val/loss"] == pytest.approx(metrics["val/loss"], rel=1e-5)


def row(*parts: dict[str, str], answer: str = "yes", **columns: object) -> str:
    return json.dumps({"messages": said([*parts, {"type": "text", "text": "Well?"}], answer), **columns})


@pytest.mark.parametrize(
    ("line", "words", "expected"),
    [
        (row(part("gone")), "", "chats.jsonl:2: there is no file"),
        (row(part("ab")), "model=llava_tiny", "chats.jsonl:1 has a recording, and models of llava take none"),
        (
            row(part("ab"), {"type": "image", "image": "ab.wav"}),
            "",
            "chats.jsonl:2 has a picture or a video, and models",
        ),
        (json.dumps({"messages": said("<audio>")}), "", "has 0 recordings, and places for 1"),
        (row(part("ab")), "model.config.audio_config.max_source_positions=77", "use a multiple of 50"),
        (row(part("ab")), "strategy=cp trainer.devices=2", "objective.name=vision_language"),
        (row(part("ab")), "model.config.audio_config.depht=4", "model.config.audio_config.depht"),
    ],
)
def test_bad_rows_are_refused_before_the_start(
    cache: Path, tmp_path: Path, line: str, words: str, expected: str
) -> None:
    write_chats(tmp_path)
    file = tmp_path / "chats.jsonl"
    first, *_ = file.read_text().splitlines()
    file.write_text(f"{first}\n{line}\n")
    given = ("data=picture_chats", f"data.paths=[{file}]", "data.chat_template=chatml")
    out = mgpu(cache, tmp_path, "check", *GIVEN, *given, *words.split(), code=2)
    assert expected in out and "Traceback" not in out


@pytest.mark.parametrize(
    ("seconds", "content", "expected"),
    [
        (4.5, b"", r"lasts 4.5 s; the model's window has 4 s"),
        (0.05, b"", r"lasts 0.05 s; the model needs more than 0.06 s"),
        (0, b"", "is empty"),
        (0, b"RIFF no sound", "is no sound that can be read|is cut short"),
    ],
)
def test_a_recording_that_cannot_be_used_stops_or_is_left_out(
    tmp_path: Path, seconds: float, content: bytes, expected: str
) -> None:
    write_chats(tmp_path)
    if seconds:
        write_wav(tmp_path / "a.wav", np.zeros(int(8000 * seconds), np.float32))
    else:
        (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(DataError, match=rf"a.wav:? ({expected}).*on_bad_sample=skip"):
        prepare(chats(tmp_path))
    prepared: Any = prepare(chats(tmp_path, "data.on_bad_sample=skip", "data.validation_fraction=0"))
    assert (prepared.train_samples, prepared.bad_samples) == (5, 1)


@pytest.mark.parametrize("kind", ["qwen2_audio", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"])
@pytest.mark.parametrize("fields", [{}, {"audio_config": {"encoder_layers": 2}, "vision_config": {"depth": 2}}])
def test_a_part_without_a_type_has_its_class_s_defaults(kind: str, fields: dict[str, Any]) -> None:
    from transformers import AutoConfig

    model, made = ModelConfig(type=kind, config=fields), AutoConfig.for_model(kind)
    window = chat_window(model)
    assert window is not None and window.bins == made.audio_config.num_mel_bins
    assert vision_field(model, "patch_size") == (made.vision_config.patch_size if "omni" in kind else None)


def test_a_missing_recording_is_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_chats(tmp_path)
    (tmp_path / "a.wav").unlink()
    prepared: Any = prepare(chats(tmp_path, "data.on_bad_sample=skip", "data.validation_fraction=0"))
    assert (prepared.train_samples, prepared.bad_samples) == (5, 1)
    assert "a.wav cannot be read: No such file or directory" in caplog.text


def test_a_conversation_that_is_too_long_with_its_recordings_is_left_out(tmp_path: Path) -> None:
    config = chats(tmp_path, "data.validation_fraction=0")
    prepared: Any = prepare(config)
    short = prepare(chats(tmp_path, "data.validation_fraction=0", f"data.seq_len={max(prepared.lengths('train')) - 1}"))
    assert short.train_samples == 5 and short.too_long_samples == 1
    assert "with their recordings" in short.too_long(config.data)


OMNI = "model=qwen25_omni_tiny"


def mixed_chats(folder: Path, *overrides: str) -> RunConfig:
    """Conversations with pictures and recordings together, with one kind, and with neither."""
    if not (folder / "chats.jsonl").is_file():
        pictures.write_chats(folder)
        (folder / "chats.jsonl").unlink()
        write_chats(folder)
        sights = ([], ["wide"], ["small", "high"], [], ["large"], [])
        rows = []
        for names, seen in zip(HEARD, sights, strict=True):
            question = [*map(part, names), *map(image, seen), {"type": "text", "text": "What?"}]
            rows.append({"messages": said(question, "".join(names) or "no")})
        (folder / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shape = ("data.seq_len=300", "data.max_pixels=1600", "model.config.vision_config.in_channels=3")
    return chats(folder, OMNI, *(shape if "model=hf" not in overrides else shape[:2]), *overrides)


def image(name: str) -> dict[str, str]:
    return {"type": "image", "image": f"{name}.png"}


def test_pictures_and_recordings_of_one_conversation_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config = mixed_chats(tmp_path, "data.validation_fraction=0")
    prepared: Any = read_prepared(json.loads(json.dumps(prepare(config).as_dict())))
    samples, every = prepared.open(config, "train"), np.arange(len(HEARD))
    batch, grid, pixels = samples.batch(every, every), prepared.grid, samples._pixels
    extractor = WhisperFeatureExtractor(**prepared.window.settings())
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": grid.least, "longest_edge": grid.most},
        **{"patch_size": grid.patch, "merge_size": grid.merge, "temporal_patch_size": grid.frames},
        **{"image_mean": list(pixels.mean), "image_std": list(pixels.std)},
    )
    for row, line in enumerate((tmp_path / "chats.jsonl").read_text().splitlines()):
        parts = json.loads(line)["messages"][0]["content"]
        waves = [decode((tmp_path / each["audio"]).read_bytes(), 16000, 60) for each in parts if "audio" in each]
        images = [Image.open(tmp_path / each["image"]) for each in parts if "image" in each]
        frames = batch["recordings"][row][batch["recordings"][row] > 0]
        ids = batch["input_ids"][row]
        assert (ids == prepared.audio_token_id).sum() == sound_tokens(frames).sum()
        if waves:
            made = extractor(
                waves, sampling_rate=16000, return_attention_mask=True, return_tensors="pt", truncation=False
            )
            inside = made["attention_mask"].bool()
            assert torch.equal(inside.sum(1), frames)
            expected = made["input_features"].transpose(1, 2)[inside]
            assert torch.allclose(batch["input_features"][row][: len(expected)], expected, atol=1e-5)
        if images:
            made = processor(images, return_tensors="pt")
            assert torch.allclose(
                batch["pixel_values"][row][: len(made["pixel_values"])], made["pixel_values"], atol=1e-5
            )
            assert (ids == prepared.image_token_id).sum() * 4 == made["image_grid_thw"].prod(1).sum()
    texts = ["".join(part.text for part in row) for row in parts_of(prepared, samples, every, every, True)]
    assert [text.count("<audio>") for text in texts] == list(map(len, HEARD))
    assert [text.count("<image>") for text in texts] == [0, 1, 2, 0, 1, 0]


@pytest.mark.parametrize("words", ["", VARIANTS["@omni3"]], ids=["2.5", "3"])
def test_tokens_stand_where_qwen_omni_puts_them(words: str) -> None:
    model: Any = build_meta(compose([*GIVEN, OMNI, *words.split()])[0].model, "AutoModelForImageTextToText")
    kind, config = build_picture_inputs(model.config), model.config
    config.vision_start_token_id, config.audio_start_token_id = 301, 303
    generator = torch.Generator().manual_seed(0)
    drawn = [kind.random_picture(generator) for _ in range(6)]
    ids = [5, 6]
    for each in drawn:
        begin = 303 if kind.placeholder_of(each) == kind.audio else 301
        ids += [begin, *[kind.placeholder_of(each)] * each.tokens, begin + 1, 7]
    rows = torch.tensor([ids])
    made = kind.collate(rows, [drawn])
    frames = made["recordings"][0]
    expected, _ = model.model.get_rope_index(rows, made["grids"][0], None, torch.ones_like(rows), False, frames)
    assert len(frames) and len(made["grids"][0]) and torch.equal(made["position_ids"][0], expected[:, 0].long())


def gemma_sounds(heard: Any) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The texts of recordings that Gemma 4's extractor has read, and the model's arguments."""
    masks = [mask[::2][::2] for mask in heard["input_features_mask"]]
    return [f"<|audio>{'<|audio|>' * int(mask.sum())}<audio|>" for mask in masks], dict(heard)


def omni_sounds(heard: Any) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The same of Qwen3-Omni."""
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

    mask = heard["attention_mask"]
    texts = ["<|audio_pad|>" * int(tokens) for tokens in _get_feat_extract_output_lengths(mask.sum(1))]
    return texts, {"input_features": heard["input_features"], "feature_attention_mask": mask}


def hear_alone(model: Any) -> None:
    """Lets transformers' Qwen3-Omni encode each recording alone, which it fills up to the longest else."""
    encode = model.model.get_audio_features

    def each(features: torch.Tensor, mask: torch.Tensor, *_: Any, **__: Any) -> Any:
        heard = [encode(*pair, return_dict=True) for pair in zip(features[:, None], mask[:, None], strict=True)]
        return SimpleNamespace(last_hidden_state=torch.cat([output.last_hidden_state for output in heard]))

    model.model.get_audio_features = each


OTHERS_EARS = {
    "gemma4": ("<|audio|>", gemma_sounds, {}),
    "qwen3_omni_moe_thinker": (
        "<|audio_pad|>",
        omni_sounds,
        {"sampling_rate": 16000, "return_attention_mask": True, "truncation": False, "padding": True},
    ),
}
"""The token of a recording in a template, the texts of recordings, and how the extractor is called."""


def test_a_short_recording_is_read_alone() -> None:
    config: Any = compose([*GIVEN, OMNI, *VARIANTS["@omni3"].split()])[0].model
    ours: Any = materialise(build_meta(config, CLASS), 0, "cpu").model.audio_tower.eval()
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    plain = type(ours)(ours.config).eval()
    plain.load_state_dict(ours.state_dict())
    lengths = [7, 9, 41, 50, 100, 141, 230]
    sounds = [torch.randn(40, frames, generator=torch.Generator().manual_seed(frames)) for frames in lengths]
    with torch.no_grad():
        together = ours(torch.cat(sounds, 1), feature_lens=torch.tensor(lengths)).last_hidden_state
        alone = [plain(each, feature_lens=torch.tensor([each.shape[1]])).last_hidden_state for each in sounds]
    assert [len(heard) for heard in alone] == [second_tokens(frames) for frames in lengths]
    assert torch.allclose(together, torch.cat(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", sampled([(name,) for name in OTHERS_EARS], lambda family: family != "gemma4"))
def test_a_family_hears_and_sees_as_its_maker_s_processor_and_model(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoFeatureExtractor, AutoModelForImageTextToText, AutoTokenizer

    from mgpu_pipe.cli.main import main

    token, sounds_of, called = OTHERS_EARS[family]
    folder = write_folder(family, tmp_path / "model")
    own = ("data.chat_template=null", "data.seq_len=400", "data.max_pixels=auto")
    config = mixed_chats(tmp_path, "model=hf", f"model.path={folder}", *own, "data.validation_fraction=0")
    write_wav(tmp_path / "cabba.wav", tones("cabbabcc", 1))  # longer than a second
    prepared: Any = read_prepared(json.loads(json.dumps(prepare(config).as_dict())))
    samples, every = prepared.open(config, "train"), np.arange(len(HEARD))
    batch, kind = samples.batch(every, every), build_picture_inputs(build_meta(config.model, CLASS).config)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder).eval()
    ours: Any = load_pretrained(config.model, "cpu", model_class=CLASS).eval()
    tokenizer, extractor = AutoTokenizer.from_pretrained(folder), AutoFeatureExtractor.from_pretrained(folder)
    if family == "qwen3_omni_moe_thinker":
        hear_alone(model)

    def prepared_inputs(messages: list[dict[str, Any]], prompt: bool) -> dict[str, Any]:
        """The inputs that the maker's processor gives; it needs torchvision."""
        parts = messages[0]["content"]
        images = [Image.open(tmp_path / each["image"]) for each in parts if "image" in each]
        shown = [{**each, "content": as_parts(each["content"])} for each in messages]
        made = prepared_by_maker(family, folder, shown, images, prompt)
        waves = [decode((tmp_path / each["audio"]).read_bytes(), 16000, 60) for each in parts if "audio" in each]
        ids = torch.tensor([made.pop("input_ids")])
        made = model_inputs(family, made, ids == model.config.image_token_id)
        if waves:
            first, *rest = tokenizer.decode(ids[0]).split(token)
            texts, heard = sounds_of(extractor(waves, return_tensors="pt", **called))
            filled = [f"{sound}{text}" for sound, text in zip(texts, rest, strict=True)]
            ids = torch.tensor([tokenizer(first + "".join(filled), add_special_tokens=False)["input_ids"]])
            made |= heard
            if images and "mm_token_type_ids" in made:
                made["mm_token_type_ids"] = (ids == model.config.image_token_id).long()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **made}

    with torch.no_grad():
        logits = ours(**kind.inputs(batch)).logits
        for row, line in enumerate((tmp_path / "chats.jsonl").read_text().splitlines()):
            made = prepared_inputs(json.loads(line)["messages"], False)
            length = made["input_ids"].shape[1]
            assert batch["input_ids"][row, :length].tolist() == made["input_ids"][0].tolist()
            assert torch.allclose(logits[row, :length], model(**made).logits[0], rtol=0, atol=2e-5)
    tuned = tmp_path / "run"
    small_runs.run(mixed_chats, tuned, 1, "model=hf", f"model.path={folder}", *own, "strategy=single")
    asked = ["generate", "--device", "cpu", "--temperature", "0", "--max-new-tokens", "6"]
    asked += ["--prompt", "<audio>What<image>?"]
    files = [f"--audio={tmp_path / 'ab.wav'}", f"--image={tmp_path / 'wide.png'}"]
    assert main([*asked, str(tuned), *files]) == 0
    answer = capsys.readouterr().out.splitlines()[-1].strip()  # after a line of deepspeed's
    exported = exported_model(tuned, type(model), capsys)
    assert main([*asked, str(tmp_path / "out"), *files]) == 0 and capsys.readouterr().out.strip() == answer
    parts = [part("ab"), {"type": "text", "text": "What"}, image("wide"), {"type": "text", "text": "?"}]
    made = prepared_inputs([{"role": "user", "content": parts}], True)
    wrote = exported.generate(**made, max_new_tokens=6, do_sample=False)[0][made["input_ids"].shape[1] :]
    assert printable(tokenizer.decode(wrote, skip_special_tokens=True)).strip() == answer
    kept, known = (json.loads((each / "processor_config.json").read_text()) for each in (tmp_path / "out", folder))
    assert kept.get("video_processor") == known.get("video_processor"), "Gemma4Processor is not built without"
    again = AutoFeatureExtractor.from_pretrained(tmp_path / "out")
    wave = decode((tmp_path / "ab.wav").read_bytes(), 16000, 60)
    assert np.array_equal(*(each([wave], **called)["input_features"] for each in (again, extractor)))


@pytest.mark.slow
def test_a_run_on_pictures_and_recordings_answers_about_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration

    from mgpu_pipe.cli.main import main
    from mgpu_pipe.inference.generation import encode, end_tokens
    from mgpu_pipe.inference.open import load_run
    from mgpu_pipe.inference.visual_prompts import PromptVisuals

    metrics = small_runs.run_moved(mixed_chats, tmp_path)
    asked = ["generate", str(tmp_path / "second"), "--device", "cpu", "--temperature", "0", "--max-new-tokens", "4"]
    loaded, sound, picture = load_run(tmp_path / "second"), tmp_path / "ab.wav", tmp_path / "wide.png"
    tokenizer, template = loaded.tokenizer(), loaded.chat()
    for question, sounds, images in (
        ("Is <audio> in <image>?", [sound], [picture]),
        ("What is <audio>?", [sound], []),
        ("What is on <image>?", [], [picture]),
    ):
        files = [*(f"--audio={file}" for file in sounds), *(f"--image={file}" for file in images)]
        assert main([*asked, "--prompt", question, *files]) == 0
        answer = capsys.readouterr().out.strip()
        # The likeliest token of the whole text so far, again and again, is the same answer.
        visuals = PromptVisuals.from_files(loaded, images, [], sounds)
        assert visuals is not None
        ids = visuals.expand(encode(tokenizer, question, template))
        prompt, ends = len(ids), end_tokens(tokenizer, template)
        while len(ids) < prompt + 4 and ids[-1] not in ends:
            inputs = visuals.reader.kind.single_row(torch.tensor(ids), visuals.in_order(ids), 0)
            with torch.no_grad():
                ids.append(int(loaded.model(**inputs).logits[0, -1].argmax()))
        assert printable(str(tokenizer.decode(ids[prompt:], skip_special_tokens=True))).strip() == answer
    exported_model(tmp_path / "second", Qwen2_5OmniThinkerForConditionalGeneration, capsys)
    check_trained_on(mixed_chats, tmp_path, metrics, 2, "data.chat_template=null", "strategy=fsdp")


@pytest.mark.slow
def test_generate_and_export_answer_like_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

    from mgpu_pipe.cli.main import main

    words = ("strategy=single", "trainer.max_steps=20", "optimizer.lr=1e-3")
    metrics, folder = small_runs.run(chats, tmp_path / "run", 1, *words), tmp_path / "run"
    files = [tmp_path / "ab.wav", tmp_path / "bccab.wav"]
    asked = ["generate", str(folder), "--device", "cpu", "--temperature", "0", "--max-new-tokens", "8"]
    question = "Is <audio> or <audio> longer?"
    assert main([*asked, "--prompt", question, "--audio", str(files[0]), "--audio", str(files[1])]) == 0
    answer = capsys.readouterr().out.strip()
    exported = exported_model(folder, Qwen2AudioForConditionalGeneration, capsys)
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    waves = [decode(file.read_bytes(), 16000, 60) for file in files]
    turns = [{"role": "user", "content": question}]
    text = processor.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=text, audio=waves, sampling_rate=16000, return_tensors="pt")
    wrote = exported.generate(**inputs, max_new_tokens=8, do_sample=False)[0][inputs["input_ids"].shape[1] :]
    assert printable(processor.tokenizer.decode(wrote, skip_special_tokens=True)).strip() == answer and answer
    # A file of prompts, with parts that name recordings, gives the same answer.
    parts = [{"type": "text", "text": "Is "}, part("ab"), {"type": "text", "text": " or "}, part("bccab")]
    content = [*parts, {"type": "text", "text": " longer?"}]
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n")
    given = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert main([*asked, *given]) == 0
    assert printable(json.loads((tmp_path / "out.jsonl").read_text())["answer"]).strip() == answer
    check_trained_on(chats, tmp_path, metrics, 1, "data.chat_template=null", "strategy=single")
    capsys.readouterr()
    for file, expected in (
        (tmp_path / "gone.wav", "no such file or folder"),
        (tmp_path / "chats.jsonl", "is no sound"),
    ):
        assert main([*asked, "--prompt", "What?", "--audio", str(file)]) == 2
        assert expected in capsys.readouterr().err
    assert main([*asked, "--prompt", "What?", "--image", str(files[0])]) == 2
    assert "Qwen2AudioForConditionalGeneration sees no pictures" in capsys.readouterr().err


TAGS = "<audio> plays <video> and <image>"


@pytest.mark.parametrize(
    ("model", "question", "kept"),
    [
        ("llava_tiny", "What do <audio> and <video> do?", "<audio> and <video>"),
        ("qwen2_audio_tiny", "What do <image> and <video> do?", "<image> and <video>"),
        ("qwen25_omni_tiny", "What does <video> do?", "<video>"),
        ("qwen25_vl_tiny", "What does <audio> do?", "<audio>"),
        ("qwen2_audio_tiny", [part("ab"), {"type": "text", "text": "Is <audio> said?"}], "Is <audio> said"),
    ],
)
def test_a_text_that_spells_a_place_the_model_does_not_take_stays_text(
    tmp_path: Path, model: str, question: Any, kept: str
) -> None:
    messages = [{"role": "system", "content": "Of <video>." if "vl" not in model else "Of."}, *said(question, TAGS)]
    write_chats(tmp_path)
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': messages})}\n")
    config = chats(tmp_path, f"model={model}", "data.validation_fraction=0", "data.global_batch_size=1")
    prepared: Any = read_prepared(json.loads(json.dumps(prepare(config).as_dict())))
    samples, first = prepared.open(config, "train"), np.arange(1)
    batch, tokenizer = samples.batch(first, first), plain_tokenizer(prepared.tokenizer_folder)
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    assert tokenizer.decode([token for token in labels if token >= 0], skip_special_tokens=True).strip() == TAGS
    assert kept in tokenizer.decode(ids, skip_special_tokens=True), "special tokens would be left out"
    there = [] if isinstance(question, str) else [prepared.audio_token_id]
    assert sorted(set(ids) & set(prepared.placeholders)) == there


def test_a_published_model_s_own_placeholder_stays_text(tmp_path: Path) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}<|AUDIO|>"
        "{% endif %}{% endfor %}<end>{% endfor %}",
        stop_tokens=("<end>", "<|AUDIO|>"),
        places=("<audio>",),
        placeholders=("<|AUDIO|>",),
    )
    rendered = template.conversation(
        row(part("x"), answer="<|AUDIO|> is a token").replace(
            '{"type": "audio", "audio": "x.wav"}', '{"type": "text", "text": "<audio> or <|AUDIO|>"}'
        ),
        "x:1",
        "messages",
    )
    tokenizer = Tokenizer(BPE({"a": 0}, [], byte_fallback=False, unk_token="a"))
    tokenizer.add_special_tokens(["<end>", "<|AUDIO|>"])
    ids = TurnEncoder(tokenizer).encode(rendered.text, rendered.starts).ids
    assert ids.count(tokenizer.token_to_id("<|AUDIO|>")) == 1


def test_spoken_questions_hold_voices_out_and_are_answered_by_what_is_said(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_speech("espeak-ng")
    monkeypatch.setattr(spoken_digits, "QUESTIONED", 90)
    config = compose(["experiment=spoken_questions", f"data.cache_dir={cache}"])[0]
    prepared: Any = read_prepared(json.loads(json.dumps(prepare(config).as_dict())))
    assert prepared.too_long_samples == prepared.bad_samples == 0
    assert prepared.train_samples + prepared.held_out_samples == 120 and prepared.held_out_samples > 0
    texts, voices, speak = synthesis.drawn_recordings("heard", 90, 16000, (1, 1))
    heard: dict[str, set[str]] = {}
    for split in ("train", "validation"):
        samples, shown = prepared.open(config, split), prepared.visual_index(split)
        every = np.arange(len(samples))
        rows = parts_of(prepared, samples, every, every, True)
        for index, row in enumerate(rows):
            numbers = [shown.visual(int(number)).frames[0] for number in shown.pictures[samples._pictures_of(index)]]
            text = "".join(part.text for part in row)
            assert text.count("<audio>") == len(numbers) in (1, 2)
            same = len(numbers) == 2 and texts[numbers[0]] == texts[numbers[1]]
            assert "Yes." in text if same else all(texts[number] in text for number in numbers)
            heard.setdefault(split, set()).update(voices[number].partition("+")[2] for number in numbers)
        assert samples.batch(every[:1], every[:1])["recordings"][0, 0] == -(-len(speak[numbers_of(samples)]()) // 160)
    assert not heard["train"] & heard["validation"] and len(heard["train"] | heard["validation"]) == 30


def numbers_of(samples: Any) -> int:
    """Number of the first recording of a split's first conversation."""
    return int(samples._sound_places(0)[0])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_four_steps_of_the_spoken_experiment(cache: Path, tmp_path: Path) -> None:
    need_speech("espeak-ng")
    few = ("data.global_batch_size=8", "data.micro_batch_size=4", "data.validation_max_samples=16")
    _, summary, _ = four_steps(cache, tmp_path, "spoken_questions", *few)
    assert 0 <= summary["metrics"]["val/exact_match"] <= 1


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_a_whole_omni_folder_names_the_way_to_its_thinker(family: str, tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import save_file

    fields = omni_fields(lambda _: 1) if "moe" in family else compose([*GIVEN, OMNI])[0].model.config
    config: Any = transformers.AutoConfig.for_model(f"{family}_thinker", **fields)
    made: Any = transformers.AutoModelForImageTextToText.from_config(config)
    weights = {f"thinker.{name}": value.contiguous() for name, value in made.state_dict().items()}
    parts = {"thinker_config": made.config.to_dict(), "talker_config": {}}
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(json.dumps({"model_type": family, **parts}))
    save_file(weights, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInputError, match=r"its thinker: transformers.(\w+).from_pretrained") as refused:
        check_model_config(ModelConfig(path=str(tmp_path / "whole")), "AutoModelForImageTextToText")
    saved = getattr(transformers, re.findall(r"transformers.(\w+).from_pretrained", str(refused.value))[0])
    saved.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "new")
    check_model_config(ModelConfig(path=str(tmp_path / "new")), "AutoModelForImageTextToText")
    written = saved.from_pretrained(tmp_path / "new").state_dict()
    assert all(torch.equal(value, written[name]) for name, value in made.state_dict().items())
