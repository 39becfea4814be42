"""Conversations about the same pictures in the held-out split, and rows of them that cannot be used."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.data.images.chat_rows import read_chat_row, rows_of
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.images.prepare_chats import PreparedPictureChats
from mgpu_pipe.data.images.visual_inputs import VisualIndex
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.tables import keep_nothing
from mgpu_pipe.data.text.heldout_split import first_of_groups, held_out, held_out_groups
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.errors import ConfigErrors, DataError
from tests.objectives.test_videos import chats as video_chats
from tests.objectives.test_vision_language import ROWS, chats
from tests.support.needs import need_pyav
from tests.support.pictures import noise, said, stored
from tests.support.sampling import one_in
from tests.support.videos import frames_of, video_folder

EVERY = np.arange(len(ROWS))


def prepared_chats(folder: Path, rows: list[dict[str, Any]], *overrides: str) -> PreparedPictureChats:
    folder.mkdir(exist_ok=True)
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = prepare(chats(folder, *overrides))
    assert isinstance(found, PreparedPictureChats)
    return found


def test_conversations_about_a_picture_stand_on_one_side(tmp_path: Path) -> None:
    """Shared alone, with others, by chains of others, and as copies of another name."""
    pictures = [f"{number}.png" for number in range(40)]
    for number, name in enumerate(pictures):
        (tmp_path / name).write_bytes(stored(noise(number)))
    (tmp_path / "copy.png").write_bytes(stored(noise(0)))
    shown = [[name] for name in pictures]
    groups = [["copy.png"], ["0.png", "1.png"], ["1.png", "0.png"], ["2.png", "1.png"], ["7.png", "8.png"], ["7.png"]]
    rows = [{"messages": said("<image>" * len(one) + f"What? {at}"), "images": one} for at, one in enumerate(shown)]
    plain = prepared_chats(tmp_path, rows)
    rows += [{"messages": said("<image>" * len(one) + "And?"), "images": one} for one in groups]
    rows += [{"messages": said("Nothing?")}]
    found = prepared_chats(tmp_path, rows)
    sides = {split: set(found.documents(split).tolist()) for split in ("train", "validation")}  # type: ignore[arg-type]
    assert len(sides["train"]) + len(sides["validation"]) == len(rows) and min(map(len, sides.values())) > 8
    together = {0, 1, 2, 40, 41, 42, 43}, {7, 8, 44, 45}
    for side in sides.values():
        assert all(not side & group or group <= side for group in together)
    before = held_out(TokenStore.open(found.folder).hashes, 0.4)
    alone = set(range(len(rows))) - set.union(*together)
    assert sides["validation"] & alone == set(np.flatnonzero(before).tolist()) & alone, "the others stay"
    assert VisualIndex.leaders(plain.shown) is None and plain.digest != found.digest


def test_groups_leave_no_side_empty_and_others_alone() -> None:
    draw = np.random.default_rng(1)
    hashes = draw.integers(0, 1 << 63, 200).astype(np.uint64)
    keys, contents = [f"{number}" for number in range(200)], [[number // 2] for number in range(200)]
    leaders = first_of_groups(contents, keys)
    assert leaders is not None and leaders[:4].tolist() == [0, 0, 2, 2]
    chosen = held_out_groups(hashes, 0.2, leaders)
    assert 20 < chosen.sum() < 60 and (chosen[::2] == chosen[1::2]).all()
    assert first_of_groups([[number] for number in range(200)], keys) is None
    assert first_of_groups([[0]] * 3 + [[]], ["a", "a", "a", "b"]) is None
    assert held_out_groups(hashes, 0.2, np.zeros(200, np.int64)).tolist() == held_out(hashes, 0.2).tolist()
    for lead in (int(hashes.argmin()), int(hashes.argmax())):
        two = np.where(np.arange(200) == (lead + 1) % 200, (lead + 1) % 200, lead)
        assert held_out_groups(hashes, 0.2, two).sum() in (1, 199), "one of two groups"


BROKEN = {
    "has 1 pictures, and places for 2": {"messages": said("<image><image>"), "images": ["0.png"]},
    "the picture is 3, not a path": {"messages": said("<image>"), "images": [3]},
    "save it to a file": {"messages": said("<image>"), "image": "https://x/y.png"},
    "has a data: URI that cannot be read": {"messages": said("<image>"), "image": "data:image/png;base64,???"},
    "no column 'messages'": {"question": "what?"},
}
MISSING = [
    {"messages": said("<image>Gone?"), "image": "gone.png"},
    {"messages": said("<image>A folder?"), "image": "."},
    {"messages": said(f"<image>{'long' * 99}"), "image": "long" * 99},
]


@pytest.mark.slow
def test_broken_rows_and_missing_files_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "0.png").write_bytes(stored(noise(0)))
    whole = [{"messages": said("<image>What?"), "image": "0.png"}, {"messages": said("Well?")}]
    rows: list[Any] = [*BROKEN.values(), *whole, *MISSING, "not an object"]
    skip = ("data.on_bad_sample=skip", "data.validation_fraction=0")
    found = prepared_chats(tmp_path, rows, *skip)
    preflight(chats(tmp_path, *skip))
    left = len(BROKEN) + len(MISSING) + 1
    assert (found.train_samples, found.bad_samples, found.amounts()[-1]) == (2, left, (left, "left out"))
    assert f"{left} of the pictures are left out: {tmp_path / 'chats.jsonl'}:1 has 1 pictures" in caplog.text
    stop: Any = chats(tmp_path, "data.validation_fraction=0").data
    lines = caplog.text
    for number, (reason, row) in enumerate([*BROKEN.items(), *(("there is no file", row) for row in MISSING)], 1):
        (tmp_path / "one.jsonl").write_text(json.dumps(whole[0]) + "\n" + json.dumps(row))
        with pytest.raises(DataError, match=f"{re.escape(reason)}.*; data.on_bad_sample=skip leaves it out"):
            list(rows_of(stop, [tmp_path / "one.jsonl"]))
        assert number > 5 or f"chats.jsonl:{number} " in lines, "five are named"
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in BROKEN.values()))
    with pytest.raises(DataError, match=r"one\.jsonl:1: has 1 pictures"):
        list(rows_of(chats(tmp_path, *skip).data, [tmp_path / "one.jsonl"]))  # type: ignore[arg-type]
    (tmp_path / "gone.png").write_bytes(stored(noise(1)))
    again = prepared_chats(tmp_path, rows, *skip)
    assert (again.train_samples, again.bad_samples) == (3, left - 1), "it has come back"


def test_a_missing_video_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    need_pyav()
    rows = [{"messages": said("<video>?"), "video": name} for name in ("gone.mp4", "walk")]
    config = video_chats(tmp_path, "data.on_bad_sample=skip", rows=rows)
    preflight(config)
    found: Any = prepare(config)
    assert (found.train_samples, found.bad_samples) == (1, 1)
    assert "1 of the pictures and videos are left out: " in caplog.text


def test_folders_of_frames_have_a_rate_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    video_folder(tmp_path / "long", frames_of(12))
    part = {"type": "video", "video": "long", "sample_fps": 6}
    rows = [
        {"messages": said("<video>?"), "video": "long"},
        {"messages": said("<video>?"), "video": "long", "fps": 3},
        {"messages": said("<video>?"), "video": "long", "sample_fps": "4.0", "fps": 99},
        {"messages": said("<video> or <video>?"), "videos": ["long", "long"], "fps": [6, None]},
        {"messages": said([part, {"type": "text", "text": "?"}])},
    ]
    config = video_chats(tmp_path, "data.seq_len=300", "data.frames_per_second=2", rows=rows)
    preflight(config)
    found: Any = prepare(config)
    shown = VisualIndex.open(found.shown)
    ends = shown.offsets.tolist()
    of_rows = [shown.pictures[begin:end].tolist() for begin, end in pairwise(ends)]
    things = [[shown.visual(at) for at in row] for row in of_rows]
    frames = [[len(thing.frames) for thing in row] for row in things]
    assert frames == [[12], [8], [6], [4, 12], [4]], "two a second of six, four, three and two seconds"
    seconds = [[len(thing.frames) * thing.seconds / 2 for thing in row] for row in things]
    assert np.allclose(np.concatenate(seconds), [6, 4, 3, 2, 6, 2])
    for value, told in ((0, "the frames a second are 0, not a number above 0"), ([1, 2], "has 2 rates of frames")):
        (tmp_path / "chats.jsonl").write_text(json.dumps({**rows[0], "fps": value}))
        with pytest.raises(ConfigErrors, match=told):
            preflight(config)


def test_a_frame_of_a_folder_stands_on_its_side(tmp_path: Path) -> None:
    """Folders that share a frame which no conversation shows alone are not linked by it."""
    for number in range(20):
        own = [noise(100 * number + frame, 16) for frame in range(3)]
        video_folder(tmp_path / f"walk{number}", [*own, noise(7, 16)])
    rows = [{"messages": said(f"<video>{number}"), "videos": [f"walk{number}"]} for number in range(20)]
    frames = [sorted((tmp_path / f"walk{number}").iterdir())[1].relative_to(tmp_path) for number in range(20)]
    rows += [{"messages": said(f"<image>{number}"), "images": [str(frame)]} for number, frame in enumerate(frames)]
    video_chats(tmp_path, rows=rows)
    found: Any = prepare(video_chats(tmp_path, "data.validation_fraction=0.4", "data.frames_per_second=2"))
    side = np.zeros(40, bool)
    side[found.documents("validation")] = True
    assert side[:20].tolist() == side[20:].tolist() and 2 < side[:20].sum() < 18


TEMPLATE = (
    "{% for message in messages %}{% if 'refused' in message.content %}{{ raise_exception('refused') }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{{ message.content.replace('<image>', '') if 'hidden' in message.content else message.content }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "reason"), one_in(2, [("refused", "refuses these messages"), ("hidden", "keeps 0 of 1 places")])
)
def test_a_row_that_the_template_refuses_is_left_out_and_others_keep_their_pictures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, word: str, reason: str
) -> None:
    """Rows and their pictures stay in step: what is left gives the samples that it gives alone."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    bad = {"messages": said(f"<image>{word}"), "images": ["p/light/2.png"]}
    given = (f"data.chat_template={tmp_path / 'chat.jinja'}", "data.validation_fraction=0", "data.seq_len=160")
    chats(tmp_path)  # its pictures
    alone = prepared_chats(tmp_path, ROWS, *given)
    expected = alone.open(chats(tmp_path, *given), "train").batch(EVERY, EVERY)
    rows = [bad, *ROWS[:3], bad, *ROWS[3:]]
    with pytest.raises(DataError, match=rf"{reason}.*data\.on_bad_sample=skip"):
        prepared_chats(tmp_path, rows, *given)
    skip = (*given, "data.on_bad_sample=skip")
    found = prepared_chats(tmp_path, rows, *skip)
    preflight(chats(tmp_path, *skip))
    assert (found.train_samples, found.bad_samples) == (len(ROWS), 2) and (2, "left out") in found.amounts()
    assert reason in caplog.text and "2 of the " in caplog.text
    batch = found.open(chats(tmp_path, *skip), "train").batch(EVERY, EVERY)
    # The tokenizer learns from rows whose places are lost, too.
    same = ("pixel_values", "pictures") if word == "hidden" else expected.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in same)
    (tmp_path / "chats.jsonl").write_text(json.dumps(bad) + "\n")
    with pytest.raises((DataError, ConfigErrors), match=reason):
        preflight(chats(tmp_path, *skip))
        prepare(chats(tmp_path, *skip))


def test_messages_of_another_column_are_checked(tmp_path: Path) -> None:
    rows = [{"talk": said("<image>What?"), "images": ["p/light/2.png"]}]
    chats(tmp_path)  # its pictures
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    preflight(chats(tmp_path, "data.messages_column=talk"))


@pytest.mark.parametrize("form", ["messages", "sides"])
def test_messages_may_be_written_as_json_texts(form: str, tmp_path: Path) -> None:
    chats(tmp_path)  # its pictures
    question = {"role": "user", "content": [{"type": "image", "image": "p/light/2.png"}, {"type": "text", "text": "a"}]}
    sides = {"prompt": [question], "completion": [{"role": "assistant", "content": "b"}]}
    columns = sides if form == "sides" else {"messages": [question, *sides["completion"]]}

    def read(write: Callable[[object], str]) -> tuple[str, tuple[Path, ...]]:
        line = json.dumps({name: write(messages) for name, messages in columns.items()})
        row = read_chat_row(line, "f:1", 1, PictureChatConfig(), tmp_path, keep_nothing(tmp_path), missing=False)
        return row.text, row.pictures

    talk = [{**question, "content": "<image>a"}, *sides["completion"]]
    assert read(json.dumps) == (json.dumps({"messages": talk}), (tmp_path / "p/light/2.png",))
    with pytest.raises(
        DataError, match=rf"^f:1: column '{next(iter(columns))}' holds messages as a text that is no JSON"
    ):
        read(str)
