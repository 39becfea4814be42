"""A list, table or tar file that cannot be read at all, beside a whole one: named and left out, as a bad sample is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.errors import BadInputError
from tests.support.needs import need_speech
from tests.support.pictures import noise, packed, stored
from tests.support.sounds import tones, write_wav

TOWER = "model.config.vision_config"
CLIP = ("model=clip_tiny", f"{TOWER}.image_size=16", f"{TOWER}.patch_size=4", f"{TOWER}.num_channels=3")
GIVEN: dict[str, tuple[str, ...]] = {
    "image_list": ("objective=image_classification", "model=vit_tiny", "model.config.num_channels=3"),
    "captions": ("objective=contrastive", *CLIP, "data.seq_len=12"),
    "audio_list": ("objective=ctc", "model=wav2vec2_tiny"),
    "picture_chats": (
        *("objective=vision_language", "model=llava_tiny", f"{TOWER}.num_channels=3"),
        *("data.chat_template=chatml", "data.seq_len=64"),
    ),
    "image_tar": ("objective=image_classification", "model=vit_tiny", "model.config.num_channels=3"),
}
SPOILED = {"empty": b"", "binary": bytes(range(256)) * 8, "blank": b"\n\n"}


def write_whole(source: str, folder: Path) -> str:
    """Writes four samples as a file; returns the suffix of its kind."""
    for number in range(4):
        (folder / f"{number}.png").write_bytes(stored(noise(number)))
    if source == "image_tar":
        members = [
            (f"{n}.{end}", raw)
            for n in range(4)
            for end, raw in (("png", stored(noise(n))), ("cls", b"ab"[n % 2 :][:1]))
        ]
        packed(folder / "whole.tar", members)
        return "tar"
    rows: list[dict[str, Any]]
    if source == "audio_list":
        need_speech()
        for number in range(4):
            write_wav(folder / f"{number}.wav", tones("ab", number))
        rows = [{"path": f"{n}.wav", "text": "ab"} for n in range(4)]
    elif source == "picture_chats":
        said = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "x"}]
        rows = [{"messages": said, "images": [f"{n}.png"]} for n in range(4)]
    else:
        rows = [{"image": f"{n}.png", "label": "ab"[n % 2], "caption": f"number {n}"} for n in range(4)]
    (folder / "whole.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "jsonl"


@pytest.mark.parametrize("source", GIVEN)
def test_unreadable_files_beside_a_whole_one_are_left_out(
    source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    suffix = write_whole(source, tmp_path)
    for name, raw in SPOILED.items():
        (tmp_path / f"{name}.{suffix}").write_bytes(raw)
    given = (*GIVEN[source], f"data={source}", f"data.paths=['{tmp_path}/*.{suffix}']", "data.validation_fraction=0")
    config, stopped = (
        compose([*given, f"data.cache_dir={tmp_path / 'cache'}", f"data.on_bad_sample={rule}"])[0]
        for rule in ("skip", "stop")
    )
    preflight(config)
    found: Any = prepare(config)
    assert found.train_samples == 4 and found.bad_samples >= len(SPOILED)
    assert all(f"{tmp_path}/{name}.{suffix}" in caplog.text for name in SPOILED)
    with pytest.raises(BadInputError, match=rf"binary\.{suffix}"):
        preflight(stopped)
    (tmp_path / f"whole.{suffix}").unlink()
    with pytest.raises(BadInputError):
        preflight(config)
        prepare(config)
