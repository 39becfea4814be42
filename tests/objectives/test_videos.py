"""Videos in conversations. Oracle: transformers' model, and its video processor's own code, which wants torchvision.

That loss and every gradient are those of one process is in test_own_sizes.py, whose random batches hold videos too.
"""

from __future__ import annotations
import __future__

import ast
import io
import json
import math
import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.images.chat_rows import rows_of
from mgpu_pipe.data.images.check_images import check_picture_chats
from mgpu_pipe.data.images.demo_pictures import CLIPS, FRAMES, SIDE, WAYS, moving_shapes
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.images.pixels import Pixels
from mgpu_pipe.data.images.videos import sample_frames
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.data.text.preview import parts_of
from mgpu_pipe.data.text.tokenizer_folder import chat_of
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors, DataError
from mgpu_pipe.inference.generation import encode
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.patch_pictures import build_picture_inputs
from tests.objectives.harness import GREEDY, check_written
from tests.objectives.test_vision_language import CLASS
from tests.support import small_runs
from tests.support.command import four_steps, mgpu
from tests.support.needs import need_pyav
from tests.support.pictures import noise, said, stored
from tests.support.sampling import one_in
from tests.support.videos import frames_of, strange_videos, video_file, video_folder

GIVEN = ("objective=vision_language", "logger=none", "trainer.progress=off")
ROWS: list[dict[str, Any]] = [
    {"messages": said("<video> Which way?", "left"), "videos": ["walk"]},
    {
        "conversations": [{"from": "human", "value": "<video>\nAnd it?"}, {"from": "gpt", "value": "up"}],
        "video": "run.mkv",
    },
    {"messages": said("<image> after <video>?", "no"), "images": ["still.png"], "videos": ["run.mkv"]},
    {
        "messages": said(
            [{"type": "video", "video": "walk"}, {"type": "image", "path": "still.png"}, {"type": "text", "text": "?"}],
            "yes",
        )
    },
    {"messages": said("Do you see me?", "No.")},
]


def chats(folder: Path, *overrides: str, rows: list[dict[str, Any]] = ROWS) -> RunConfig:
    if not (folder / "chats.jsonl").exists():
        video_folder(folder / "walk", frames_of(5))
        video_file(folder / "run.mkv", frames_of(40, (18, 10)))
        (folder / "still.png").write_bytes(stored(noise(1, 16)))
        (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tower = "model.config.vision_config"
    shape = (f"{tower}.in_channels=3", f"{tower}.temporal_patch_size=2", "model.config.text_config.vocab_size=300")
    given = ("data=picture_chats", f"data.paths=[{folder / 'chats.jsonl'}]", f"data.cache_dir={folder / 'cache'}")
    more = ("data.chat_template=chatml", "data.seq_len=160", "data.max_pixels=256", "data.validation_fraction=0")
    steps = ("model=qwen25_vl_tiny", "data.global_batch_size=4", "data.num_workers=0", "trainer.max_steps=2")
    return compose([*GIVEN, *given, *more, *steps, *shape, *overrides])[0]


def of_transformers(name: str, family: str = "qwen2_vl") -> Any:
    """A function of transformers' video processor, whose module cannot be imported without torchvision."""
    found = find_spec("transformers")
    assert found is not None and found.origin is not None
    file = Path(found.origin).parent / "models" / family / f"video_processing_{family}.py"
    functions = [one for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.FunctionDef)]
    (own,) = [one for one in functions if one.name == name]
    space: dict[str, Any] = {"torch": torch, "math": math, "np": np}
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module([own], []), str(file), "exec", flags, dont_inherit=True), space)
    return space[name]


def test_videos_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    need_pyav()
    config = chats(tmp_path)
    prepared: Any = read_prepared(json.loads(json.dumps(prepare(config).as_dict())))
    samples, every = prepared.open(config, "train"), np.arange(len(ROWS))
    batch = samples.batch(every, -1 - every)
    # Five frames of a folder are two pairs, four seconds of ten frames a second four; each frame's sides are multiples.
    walk, run, still = [2, 6, 8], [4, 8, 4], [1, 8, 8]
    assert [[grid for grid in row if any(grid)] for row in batch["grids"].tolist()] == [
        *([walk], [run], [still, run], [walk, still], [])
    ]
    model: Any = materialise(build_meta(prepared.complete(config).model, CLASS), 1, "cpu").model  # type: ignore[union-attr]
    kinds = {"image": prepared.image_token_id, "video": prepared.video_token_id}
    assert (model.config.image_token_id, model.config.video_token_id) == tuple(kinds.values())
    seconds = {tuple(walk): 5 / 4, tuple(run): 1.0}
    for row, ids in enumerate(batch["input_ids"]):
        grids = [one for one in batch["grids"][row].tolist() if any(one)]
        videos, pictures = [one for one in grids if one != still], [one for one in grids if one == still]
        found, _ = model.get_rope_index(
            ids[None],
            ((ids == kinds["image"]).int() + 2 * (ids == kinds["video"]).int())[None],
            torch.tensor(pictures) if pictures else None,
            torch.tensor(videos) if videos else None,
            torch.tensor([seconds[tuple(one)] for one in videos]),
        )
        assert torch.equal(batch["position_ids"][row], found[:, 0])
    # The patches of the right frames, in transformers' order.
    patchify, grid = of_transformers("patchify"), prepared.grid
    for row, frames, chosen in ((0, frames_of(5), [0, 1, 2, 3]), (1, frames_of(40, (18, 10)), range(0, 40, 5))):
        pixels = samples._pixels
        values = np.stack([Pixels.array(pixels, pixels.scale(frames[at])) for at in chosen])
        own, *_ = patchify(None, torch.from_numpy(values)[None], grid.patch, grid.merge, grid.frames)
        assert torch.equal(batch["pixel_values"][row][: own.shape[1]], own[0])
    text = ["".join(part.text for part in one) for one in parts_of(prepared, samples, every, every, True)]
    assert [(one.count("<image>"), one.count("<video>")) for one in text] == [(0, 1), (0, 1), (1, 1), (1, 1), (0, 0)]
    trained = samples.batch(every, every)
    assert torch.equal(trained["pixel_values"], samples.batch(every, every)["pixel_values"])


def test_pictures_of_a_video_that_are_told_their_times_are_those_of_transformers(tmp_path: Path) -> None:
    """Qwen3-VL: tokens, positions and logits of each row."""
    from transformers import AutoTokenizer, Qwen3VLProcessor

    need_pyav()
    config = chats(tmp_path, "model=qwen3_vl_tiny", "data.seq_len=240", "data.frames_per_second=1.5")
    prepared: Any = read_prepared(json.loads(json.dumps(prepare(config).as_dict())))
    samples, every = prepared.open(config, "train"), np.arange(len(ROWS))
    batch = samples.batch(every, -1 - every)
    model: Any = materialise(build_meta(prepared.complete(config).model, CLASS), 1, "cpu").eval()
    kind, tokenizer = build_picture_inputs(model.config), AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
    assert tokenizer.convert_tokens_to_ids("<|vision_start|>") is not None
    # Five frames of a folder are three pairs, the last its own, and six of forty in a file three.
    chosen = {"walk": (np.arange(5), 1.5, [3, 6, 8]), "run": (np.arange(6) * 39 / 5, 10.0, [3, 8, 4])}
    shown = [["walk"], ["run"], ["still", "run"], ["walk", "still"], []]
    processor = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    processor.video_token, processor.video_processor = "<video>", SimpleNamespace(merge_size=2, temporal_patch_size=2)
    processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    with torch.no_grad():
        together = model(**kind.inputs(batch)).logits
    template = chat_of(prepared.tokenizer_folder)
    assert template is not None
    for row, said_in in enumerate(rows_of(config.data, [tmp_path / "chats.jsonl"])):  # type: ignore[arg-type]
        text, *_ = template.conversation(said_in.text, said_in.origin, "messages")
        grids: dict[str, list[Any]] = {"still": [], "video": []}
        patches: dict[str, list[Any]] = {"still": [], "video": []}
        given = dict[str, Any]()
        at = 0
        for name in shown[row]:
            which = "still" if name == "still" else "video"
            if which == "video":
                indices, rate, grid = chosen[name]
                facts = SimpleNamespace(frames_indices=indices.round().astype(int), fps=rate)
                seen = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [facts]}
                written = processor.replace_video_token(seen, 0)
                text = text.replace("<video>", written.replace("<video>", "\0"), 1)
            else:
                grid = [1, 8, 8]
                text = text.replace("<image>", "<image>" * 16, 1)
            grids[which].append(grid)
            patches[which].append(batch["pixel_values"][row, at : at + math.prod(grid)])
            at += math.prod(grid)
        ids = tokenizer(text.replace("\0", "<video>"), return_tensors="pt", add_special_tokens=False)["input_ids"]
        length = ids.shape[1]
        assert batch["input_ids"][row, :length].tolist() == ids[0].tolist()
        kinds = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
        for which, pixels, sizes in (
            ("still", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            if grids[which]:
                given |= {pixels: torch.cat(patches[which]), sizes: torch.tensor(grids[which])}
        thw = [given.get(f"{one}_grid_thw") for one in ("image", "video")]
        found, _ = model.model.get_rope_index(ids, kinds, *thw)
        assert torch.equal(batch["position_ids"][row, :, :length], found[:, 0])
        with torch.no_grad():
            alone = model(input_ids=ids, mm_token_type_ids=kinds, **given).logits[0]
        assert torch.allclose(together[row, :length], alone, rtol=0, atol=1e-5)
    lengths = (samples.length, batch["input_ids"] != prepared.padding_token_id)
    assert (lengths[0] - lengths[1].sum(1).numpy() <= 1).all(), "known before any is read"


def test_frames_of_a_video_are_changed_alike(tmp_path: Path) -> None:
    need_pyav()
    augmented = ("data.augment.crop_area=[0.1,1]", "data.augment.rand_ops=2", "data.augment.brightness=0.4")
    config = chats(tmp_path, "data.shift=4", "data.turn=30", *augmented, rows=ROWS[:1])
    first = (tmp_path / "walk" / "000.png").read_bytes()
    for frame in (tmp_path / "walk").iterdir():
        frame.write_bytes(first)
    samples: Any = prepare(config).open(config, "train")
    (trained,), (other,) = samples._seen_pictures(0, 7), samples._seen_pictures(0, 8)
    begin, end = np.split(trained, 2)
    assert np.array_equal(begin, end) and not np.array_equal(trained, other)


@pytest.mark.parametrize(("total", "rate", "most"), [(40, 10.0, 768), (7, 30.0, 768), (300, 29.97, 9), (3, 5.0, 768)])
def test_frames_are_chosen_as_transformers_chooses_them(total: int, rate: float, most: int) -> None:
    own = SimpleNamespace(fps=2.0, min_frames=4, max_frames=most)
    told = of_transformers("sample_frames", "qwen3_vl")(own, SimpleNamespace(total_num_frames=total, fps=rate))
    assert (
        sample_frames(total, rate, PictureChatConfig(max_frames=most), 2, writes_times=True)[0].tolist()
        == told.tolist()
    )
    data = PictureChatConfig(max_frames=most)
    usual = SimpleNamespace(num_frames=None, fps=data.frames_per_second, temporal_patch_size=2, min_frames=4)
    usual.max_frames = most
    found = of_transformers("sample_frames")(usual, SimpleNamespace(total_num_frames=total, fps=rate))
    chosen, seconds = sample_frames(total, rate, data, 2)
    assert chosen.tolist() == found.tolist()
    assert seconds == pytest.approx(2 / (len(found) / total * rate)), "its sampled_fps"


@pytest.mark.slow
def test_a_video_that_cannot_be_used_stops_or_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    need_pyav()
    strange = strange_videos(tmp_path)
    rows = [*({"messages": said(f"<video>{name}"), "videos": [name]} for name in strange), ROWS[-1]]
    config = chats(tmp_path, rows=rows)
    lines = (tmp_path / "chats.jsonl").read_text().splitlines(keepends=True)
    for line, told in zip(lines, strange.values(), strict=False):
        (tmp_path / "chats.jsonl").write_text(line + lines[-1])
        with pytest.raises(DataError, match=f"{re.escape(told)}.*data.on_bad_sample=skip"):
            prepare(config)
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    prepared: Any = prepare(chats(tmp_path, "data.on_bad_sample=skip"))
    assert (prepared.train_samples, prepared.bad_samples) == (1, len(strange))
    assert "left out: " in caplog.text


def test_a_video_of_more_frames_than_places_is_left_out_and_told(tmp_path: Path) -> None:
    need_pyav()
    prepared: Any = prepare(chats(tmp_path, "data.frames_per_second=10"))
    assert prepared.train_samples == 3 and prepared.too_long_samples == 2
    assert prepare(chats(tmp_path, "data.frames_per_second=10", "data.max_frames=8")).train_samples == len(ROWS)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": said("<video><video>"), "video": "walk"}, "has 1 videos, and places for 2"),
        (
            {"messages": said([{"type": "video", "video": "run.mkv", "video_start": 1.0}])},
            "video_start=1.0 names a part of its file",
        ),
        ({"messages": said("<image>"), "video": "walk"}, "has 0 pictures, and places for 1"),
        ({"messages": said("<video>"), "video": "gone.mp4"}, "there is no file"),
        ({"messages": said("hm", "<video>"), "video": "walk"}, "has 1 videos, and places for 0"),
    ],
)
def test_rows_that_do_not_hold_together_are_refused(tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    config = chats(tmp_path, rows=[row])
    with pytest.raises(ConfigErrors, match=re.escape(expected)):
        check_picture_chats(config.model, config.data)


def test_a_model_that_is_given_no_videos_is_refused_before_the_run(cache: Path, tmp_path: Path) -> None:
    video_folder(tmp_path / "walk", frames_of(5))
    (tmp_path / "chats.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    given = ("data=picture_chats", "data.paths=[chats.jsonl]", "data.chat_template=chatml", "model=smolvlm_tiny")
    given = (*given, "data.seq_len=64")
    out = " ".join(mgpu(cache, tmp_path, "check", *GIVEN, *given, code=2).split())
    assert (
        "has a video, and models of smolvlm take none; use one of qwen2_5_vl, qwen3_5" in out and "Traceback" not in out
    )


def test_without_pyav_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.mkv").write_bytes(b"x")
    (tmp_path / "chats.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"PyAV is not installed.*pip install 'mgpu_pipe\[video\]'"):
        prepare(chats(tmp_path))


@pytest.mark.slow
def test_no_frame_tells_the_way_and_clips_are_held_out_whole(cache: Path) -> None:
    frames, questions = moving_shapes()
    again, _ = moving_shapes()
    assert np.array_equal(frames, again) and len(questions) == CLIPS
    clips = frames.reshape(CLIPS, FRAMES, SIDE, SIDE).astype(int)
    for number in range(0, CLIPS, 97):
        steps = list(WAYS.values())[number % len(WAYS)]
        fits = [
            speed
            for speed in (1, 2)
            if all(
                np.array_equal(np.roll(one > 127, [speed * step for step in steps], (0, 1)), after > 127)
                for one, after in zip(clips[number], clips[number][1:], strict=False)
            )
        ]
        assert len(fits) == 1, "it moves as the answer says"
    config = compose(["experiment=video_shapes", f"data.cache_dir={cache}"])[0]
    prepared: Any = prepare(config)
    assert prepared.too_long_samples == 0 and prepared.train_samples + prepared.held_out_samples == CLIPS
    assert 0.15 * CLIPS < prepared.held_out_samples < 0.25 * CLIPS


@pytest.mark.exhaustive
@pytest.mark.slow
def test_four_steps_of_the_experiment_show_frames_beside_answers(cache: Path, tmp_path: Path) -> None:
    few = ("data.global_batch_size=8", "data.micro_batch_size=4", "data.validation_max_samples=16")
    _, summary, report = four_steps(cache, tmp_path, "video_shapes", *few)
    assert 0 <= summary["metrics"]["val/exact_match"] <= 1
    assert report.count('src="data:image/png;base64,') >= 12
    assert not re.search(r"user (Which|Where)|[?] assistant", report), "the question alone"
    assert len(re.findall(r"Which way does the|Where does the", report)) >= 12


run = partial(small_runs.run, chats)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), one_in(2, [("qwen3_vl", "Qwen3VL"), ("qwen25_vl", "Qwen2_5_VL")]))
def test_generate_and_chat_are_shown_videos_and_an_export_says_how_they_are_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, name: str
) -> None:
    import transformers

    from mgpu_pipe.cli.main import main
    from mgpu_pipe.inference.open import load_run
    from mgpu_pipe.inference.visual_prompts import PromptVisuals

    need_pyav()
    run(tmp_path / "run", 1, f"model={model}_tiny", "strategy=single", "data.seq_len=240", "data.max_frames=4")
    loaded = load_run(tmp_path / "run")
    still, walk, film = (tmp_path / one for one in ("still.png", "walk", "run.mkv"))
    visuals = PromptVisuals.from_files(loaded, [still], [walk, film])
    assert visuals is not None and loaded.config is not None
    # A prompt's inputs are those of the row that is trained on, whose questions are the second half of these.
    prepared: Any = prepare(loaded.config)
    samples, template = prepared.open(loaded.config, "train"), chat_of(prepared.tokenizer_folder)
    assert template is not None
    asked = [{"role": "user", "content": "<video><image>?"}]
    one = PromptVisuals.from_files(loaded, [still], [walk])
    assert one is not None
    ids = one.expand(encode(loaded.tokenizer(), asked, template))
    row = samples.batch(np.array([3]), np.array([-1]))
    assert row["input_ids"][0, : len(ids)].tolist() == ids
    given = one.inputs([ids], torch.device("cpu"))
    assert torch.equal(given["position_ids"][:, 0], row["position_ids"][0, :, : len(ids)])
    patches = torch.cat([given["pixel_values_videos"], given["pixel_values"]])
    assert torch.equal(patches, row["pixel_values"][0, : len(patches)])
    shown = ["--image", str(still), "--video", str(walk), "--video", str(film)]
    question = "Is <video> or <image> like <video>?"
    assert main(["generate", str(tmp_path / "run"), *GREEDY, "--prompt", question, *shown]) == 0
    answer = capsys.readouterr().out.strip()
    talk = f"/video {tmp_path}/gone.mkv\n/image {still}\n/video {walk}\n/video {film}\n{question}\n/exit\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(talk))
    assert main(["chat", str(tmp_path / "run"), *GREEDY]) == 0
    spoken = capsys.readouterr()
    assert spoken.out.startswith(answer) and "gone.mkv: no such file or folder" in spoken.err
    assert main(["generate", str(tmp_path / "run"), *GREEDY, "--prompt", "<video>", "--image", str(still)]) == 2
    assert "the prompt has 1 places for 0 videos" in capsys.readouterr().err
    # transformers' own model writes the same, making its positions itself.
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    exported = getattr(transformers, f"{name}ForConditionalGeneration").from_pretrained(tmp_path / "out")
    ids = visuals.expand(encode(loaded.tokenizer(), [{"role": "user", "content": question}], template))
    shown = [visuals.videos[0], visuals.pictures[0], visuals.videos[1]]
    plain = visuals.reader.kind.single_row(torch.tensor(ids), shown, 0)
    if name == "Qwen3VL":
        del plain["second_per_grid_ts"]  # its text tells the times
    check_written(exported, loaded.tokenizer(), answer, **plain)
    how = json.loads((tmp_path / "out" / "video_preprocessor_config.json").read_text())
    assert how["video_processor_type"] == f"{'Qwen3VL' if name == 'Qwen3VL' else 'Qwen2VL'}VideoProcessor"
    assert (how["fps"], how["max_frames"], how["patch_size"]) == (2.0, 4, 2)
    if name == "Qwen3VL":
        smart = of_transformers("smart_resize", "qwen3_vl")
        for height, width in ((18, 10), (300, 40)):  # a smaller one is scaled up frame by frame here
            most = min(how["max_video_tokens"] * 16, how["size"]["longest_edge"] // 4)
            sides = smart(4, height, width, 2, 4, how["size"]["shortest_edge"], max(most, 1) * 4)
            assert [side // 4 for side in sides] == list(prepared.grid.places(height, width))


def test_a_model_that_sees_no_videos_is_shown_none(tmp_path: Path) -> None:
    from mgpu_pipe.inference.visual_prompts import PromptVisuals

    small = compose([*GIVEN, "model=llava_tiny", "data=picture_chats", "data.paths=[x]", "data.seq_len=64"])[0]
    model = build_meta(small.model, CLASS)
    loaded: Any = SimpleNamespace(model=model, config=small, tokenizer_folder=tmp_path, source=tmp_path)
    with pytest.raises(BadInputError, match=r"--video=walk: LlavaForConditionalGeneration sees no videos"):
        PromptVisuals.from_files(loaded, [], [Path("walk")])
