"""Files of prompts with pictures, and of recordings. Oracle: transformers' own ``generate`` and processors on the
export, row by row.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mgpu_pipe.cli.main import main
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.audio_samples import mark_mistakes
from mgpu_pipe.inference.batch.job_folder import LineFolder
from mgpu_pipe.report.run_tables import after_table
from tests.inference.test_answer_files import write_rows
from tests.objectives.test_speech_seq2seq import listed
from tests.objectives.test_vision_language import chats
from tests.support import small_runs
from tests.support.command import mgpu
from tests.support.needs import need_speech
from tests.support.sounds import tones, write_wav

QUESTION = "What is it?"
PARTS = [{"type": "image", "path": "p/light/0.png"}, {"type": "text", "text": QUESTION}]
SHOWN: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"prompt": QUESTION, "images": ["p/dark/0.png"]}, f"<image>{QUESTION}", ["p/dark/0.png"]),
    ({"messages": [{"role": "user", "content": PARTS}]}, f"<image>{QUESTION}", ["p/light/0.png"]),
    (
        {"prompt": "Is <image> or <image> dark?", "images": ["p/light/1.png", "p/dark/1.png"]},
        "Is <image> or <image> dark?",
        ["p/light/1.png", "p/dark/1.png"],
    ),
    ({"prompt": "Do you see me?"}, "Do you see me?", []),
    (
        {
            "image": "p/dark/2.png",
            "conversations": [{"from": "human", "value": "<image>And it?"}, {"from": "gpt", "value": "dark"}],
        },
        "<image>And it?",
        ["p/dark/2.png"],
    ),
    ({"prompt": QUESTION, "image": "p/stripes/3.png"}, f"<image>{QUESTION}", ["p/stripes/3.png"]),
]
"""Rows, and the question and the pictures of each."""
GREEDY = ("--temperature", "0", "--max-new-tokens", "8")
STRONG = "model.config.text_config.initializer_range=0.3"
"""Weights whose next tokens are far from ties."""


def answers(file: Path) -> list[str]:
    return [json.loads(line)["answer"] for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_questions_about_pictures_are_answered_as_by_transformers(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image
    from transformers import AutoTokenizer, LlavaForConditionalGeneration
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    small_runs.run(chats, tmp_path / "run", 1, STRONG, "trainer.max_steps=1", "strategy=single")
    write_rows(tmp_path / "asked.jsonl", [row for row, _, _ in SHOWN])
    words = ["generate", str(tmp_path / "run"), "--input", str(tmp_path / "asked.jsonl"), *GREEDY, "--output"]
    assert main([*words, str(tmp_path / "told.jsonl")]) == 0
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    model: Any = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    processor = LlavaImageProcessorPil.from_pretrained(tmp_path / "out")
    expected = []
    for _, question, pictures in SHOWN:
        content = question.replace("<image>", 16 * "<image>")
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        if pictures:
            inputs |= processor([Image.open(tmp_path / picture) for picture in pictures], return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0][inputs["input_ids"].shape[1] :]
        expected.append(tokenizer.decode(ids, skip_special_tokens=True))
    assert answers(tmp_path / "told.jsonl") == expected and len(set(expected)) > 3
    # A model folder and two processes answer alike.
    shared = ["generate", "out", "--input", "asked.jsonl", *GREEDY, "--output", "two.jsonl", "--batch-size", "2"]
    mgpu(cache, tmp_path, *shared, "trainer.devices=2", "trainer.accelerator=cpu")
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "told.jsonl").read_bytes()
    _check_bad_rows(tmp_path, words[:2])
    _check_changed_picture(tmp_path, words, monkeypatch, capfd)


def _check_changed_picture(
    place: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A job that stops before its end, and resumes after a picture has changed and is restored."""
    words, picture = [*words, str(place / "late.jsonl")], place / "p" / "light" / "1.png"

    def stop(folder: LineFolder, rows: dict[int, bytes]) -> None:
        raise BadInputError("stopped")

    with monkeypatch.context() as context:
        context.setattr(LineFolder, "finish", stop)
        assert main(words) == 2
    content = picture.read_bytes()
    picture.write_bytes((place / "p" / "dark" / "1.png").read_bytes())
    assert main(words) == 2
    assert "a picture, video or recording of the input has changed since" in capfd.readouterr().err
    picture.write_bytes(content)
    assert main(words) == 0
    assert (place / "late.jsonl").read_bytes() == (place / "told.jsonl").read_bytes()


def _check_bad_rows(place: Path, words: list[str]) -> None:
    (place / "broken.png").write_bytes(b"no picture")
    bad: list[Any] = [
        {"prompt": QUESTION, "images": ["gone.png"]},
        {"prompt": QUESTION, "images": ["broken.png"]},
        {"prompt": "<image> or <image>?", "images": ["p/dark/0.png"]},
        {"prompt": QUESTION, "videos": ["broken.png"]},
        {"messages": [{"role": "assistant", "content": "dark"}], "images": ["p/dark/0.png"]},
    ]
    write_rows(place / "bad.jsonl", [*bad, SHOWN[0][0]])
    words = [*words, "--input", str(place / "bad.jsonl"), *GREEDY, "--output", str(place / "some.jsonl")]
    assert main(words) == 2
    assert main([*words, "--on-bad-row", "skip"]) == 0
    rows = [json.loads(line) for line in (place / "some.jsonl").read_text().splitlines()]
    problems = ("there is no file", "broken.png: is no picture", "has 1 pictures", "sees no videos", "must be a list")
    for number, (row, problem) in enumerate(zip(rows, problems, strict=False), start=1):
        assert f"bad.jsonl:{number}: " in row["error"] and problem in row["error"], row
    assert rows[-1]["answer"] == answers(place / "told.jsonl")[0]


@pytest.mark.slow
def test_recordings_are_transcribed_as_by_transformers(
    tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    need_speech()
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    strong = ("model.config.init_std=0.3", "trainer.max_steps=1", "strategy=single")
    small_runs.run(listed, tmp_path / "run", 1, *strong)
    recordings = ["ab", "b ab", "aab", "ba", "a b"]
    (tmp_path / "said").mkdir()
    for number, text in enumerate(recordings):
        write_wav(tmp_path / "said" / f"{number}.wav", tones(text, 90 + number))
    write_rows(tmp_path / "said" / "all.jsonl", [{"path": f"{n}.wav", "text": t} for n, t in enumerate(recordings)])
    words = ["generate", str(tmp_path / "run"), "--input", str(tmp_path / "said" / "all.jsonl"), "--output"]
    limits = ("--max-new-tokens", "9", "--batch-size", "2")
    assert main([*words, str(tmp_path / "heard.jsonl"), *limits]) == 0
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    model: Any = WhisperForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    processor: Any = WhisperProcessor.from_pretrained(tmp_path / "out")
    from mgpu_pipe.data.audio.decode_audio import decode

    expected = []
    for number in range(len(recordings)):
        wave = decode((tmp_path / "said" / f"{number}.wav").read_bytes(), 16000, 30)
        inputs = processor(wave, sampling_rate=16000, return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(inputs.input_features, max_new_tokens=9, do_sample=False)[0]
        expected.append(processor.tokenizer.decode(ids, skip_special_tokens=True).strip())
    assert answers(tmp_path / "heard.jsonl") == expected and len(set(expected)) > 1
    shared = ["generate", "out", "--input", "said/all.jsonl", "--output", "two.jsonl", *limits]
    mgpu(cache, tmp_path, *shared, "trainer.devices=2", "trainer.accelerator=cpu")
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "heard.jsonl").read_bytes()
    stop = max(expected, key=len)[1:3]
    assert main([*words, str(tmp_path / "stop.jsonl"), *limits, "--stop", stop]) == 0
    assert answers(tmp_path / "stop.jsonl") == [text.partition(stop)[0] for text in expected]
    capfd.readouterr()
    assert main([*words, str(tmp_path / "no.jsonl"), "--temperature", "0.5"]) == 2
    assert "--temperature=0.5: transcripts take the likeliest" in capfd.readouterr().err
    (tmp_path / "said" / "noise.wav").write_bytes(b"no sound")
    write_rows(tmp_path / "said" / "all.jsonl", [{"path": "gone.wav"}, {"path": "noise.wav"}, {"prompt": "one"}])
    assert main([*words, str(tmp_path / "no.jsonl")]) == 2
    assert main([*words, str(tmp_path / "no.jsonl"), "--on-bad-row", "skip"]) == 0
    errors = [json.loads(line)["error"] for line in (tmp_path / "no.jsonl").read_text().splitlines()]
    assert "gone.wav: cannot be read" in errors[0] and "noise.wav: " in errors[1] and "no recording" in errors[2]


@pytest.mark.parametrize(
    ("said", "heard", "shown"),
    [
        ("please press one now", "please wun", "please wun\n  missed: one, now; wrong: wun for press"),
        ("press one", "press uh one", "press uh one\n  added: uh"),
        ("press one", "press one uh uh", "press one uh uh\n  added: uh (2 times)"),
        ("press one", "press one", "press one"),
        ("press one", "", "(nothing was heard)"),
        (" ".join("abcdefghijklmnop"), "a", "a\n  missed: b, c, d, e, f, g, h, i, j, k, l, m, and 3 more"),
    ],
)
def test_mistakes_of_a_transcript_are_named_in_words(said: str, heard: str, shown: str) -> None:
    pytest.importorskip("jiwer")
    assert mark_mistakes(said, heard) == shown


def test_a_terminal_shows_what_was_said_and_what_was_missed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jiwer")
    said = "please press one now"
    after_table({"samples": [{"prompt": said, "text": f" \u2192 {mark_mistakes(said, 'please one')}"}]})
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "please press one now \u2192 please one" in lines and "missed: press, now" in lines
