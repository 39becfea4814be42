"""Pictures of every mode, bad ones, folders and lists, and random changes that no topology sees. Oracle: numpy."""

from __future__ import annotations

import glob
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data import fingerprint
from mgpu_pipe.data.bad_samples import BadSampleError
from mgpu_pipe.data.cache import block_hash
from mgpu_pipe.data.files import match_glob
from mgpu_pipe.data.images import picture_files as sources
from mgpu_pipe.data.images import scan_images as scan
from mgpu_pipe.data.images.decode_image import decode
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors, DataError
from tests.support.pictures import folder_of_classes, noise, stored, strange
from tests.support.sampling import one_in

MODEL = ("model=vit_tiny", "model.config.num_channels=3", "model.config.image_size=16", "model.config.patch_size=4")
SHAPE = ("objective=image_classification", "data.global_batch_size=8", "trainer.max_steps=4", *MODEL)


def configured(tmp_path: Path, *overrides: str, source: str = "image_folder") -> RunConfig:
    return compose([*SHAPE, f"data={source}", f"data.cache_dir={tmp_path / 'cache'}", *overrides])[0]


def pixels(image: Any) -> np.ndarray:
    return np.asarray(image).astype(int)


def test_every_mode_becomes_what_it_shows() -> None:
    plain = noise(1)
    for form in ("PNG", "BMP", "TIFF", "PPM"):
        assert (pixels(decode(stored(plain, form), 3)) == pixels(plain)).all(), form
    assert decode(stored(plain, "JPEG"), 1).mode == "L"
    cmyk = decode(stored(plain.convert("CMYK"), "JPEG", quality=100), 3)
    assert cmyk.mode == "RGB" and abs(pixels(cmyk) - pixels(plain)).mean() < 12
    palette = plain.convert("P", palette=Image.Palette.ADAPTIVE, colors=256)
    assert (pixels(decode(stored(palette), 3)) == pixels(palette.convert("RGB"))).all()
    clear = plain.convert("RGBA")
    clear.putalpha(0)
    assert (pixels(decode(stored(clear), 3)) == 255).all(), "what is transparent lies on white"
    half = np.full((4, 4), 128, np.uint8)
    seen = decode(stored(Image.merge("LA", (Image.new("L", (4, 4), 0), Image.fromarray(half)))), 1)
    assert (pixels(seen) == 127).all()
    deep = np.linspace(0, 65535, 16).astype(np.uint16).reshape(4, 4)
    assert (pixels(decode(stored(Image.fromarray(deep)), 1)) == np.round(deep / 257)).all(), "no clipping at 255"
    turned = Image.Exif()
    turned[0x0112] = 6  # stored on its side
    wide = plain.resize((12, 6))
    assert decode(stored(wide, "JPEG", exif=turned), 3).size == (6, 12)


@pytest.mark.parametrize("name", one_in(2, sorted(strange())))
def test_what_cannot_be_used_is_named_and_stops_or_is_left_out(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content, told = strange()[name]
    root = folder_of_classes(tmp_path / "pictures")
    (root / "dark" / name).write_bytes(content)
    if content:
        with pytest.raises(BadSampleError) as refused:
            decode(content, 3)
        assert str(refused.value).startswith(told)
    with pytest.raises(DataError) as stopped:
        prepare(configured(tmp_path, f"data.paths=[{root}]"))
    assert f"{root}/dark/{name} {told}" in str(stopped.value)
    assert str(stopped.value).endswith("or leave it out by data.on_bad_sample=skip")
    config = configured(tmp_path, f"data.paths=[{root}]", "data.on_bad_sample=skip")
    found = prepare(config)
    assert f"1 of the pictures are left out: {root}/dark/{name} {told}" in caplog.text
    assert found.as_dict()["bad_samples"] == 1 and (1, "left out") in found.amounts()
    (root / "dark" / name).unlink()
    clean = prepare(config)
    assert clean.train_samples + clean.validation_samples == 24 == found.train_samples + found.validation_samples


def test_folders_csv_and_json_lines_give_the_same_pictures(tmp_path: Path) -> None:
    root = folder_of_classes(tmp_path / "pictures")
    listed = [(path.relative_to(tmp_path), path.parent.name) for path in sorted(root.glob("*/*.png"))]
    (tmp_path / "list.csv").write_text("".join(f"{row}\n" for row in ("image,label", *(f"{p},{c}" for p, c in listed))))
    lines = (json.dumps({"picture": str(path), "class": name}) for path, name in listed)
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    named = ("data.image_column=picture", "data.label_column=class")
    configs = [
        configured(tmp_path, f"data.paths=[{root}]"),
        configured(tmp_path, f"data.paths=[{tmp_path}/list.csv]", source="image_list"),
        configured(tmp_path, f"data.paths=[{tmp_path}/list.jsonl]", *named, source="image_list"),
    ]
    for form, change in (("windows", lambda path: path.replace("/", "\\")), ("ids", lambda path: path[:-4])):
        rows = [f"{change(str(path))},{name}" for path, name in listed]
        (tmp_path / f"{form}.csv").write_text("\n".join(["image,label", *rows]))
        configs.append(configured(tmp_path, f"data.paths=[{tmp_path}/{form}.csv]", source="image_list"))
    found = [prepare(config) for config in configs]
    assert len({one.digest for one in found}) == 1
    assert read_prepared(json.loads(json.dumps(found[0].as_dict()))) == found[0]
    assert found[0].model_fields()["label2id"] == {"dark": 0, "light": 1, "stripes": 2}
    every = np.arange(found[0].train_samples)
    batches = [one.open(config, "train").batch(every, every) for one, config in zip(found, configs, strict=True)]
    brightness = batches[0]["pixel_values"].mean((1, 2, 3))
    assert (brightness[batches[0]["labels"] == 1].min() > brightness[batches[0]["labels"] == 0].max()).all()
    for name, value in batches[0].items():
        assert all((batch[name] == value).all() for batch in batches)
    for config in configs:
        preflight(config)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("image,label\nnone.png,a\n", "list.csv:2: there is no file"),
        ("image,label\n1,a\n", "paths are seen from the table's folder: put the table into "),
        ('{"images": [], "annotations": []}', "has no column 'image'; it is COCO's: write a table"),
        ("picture,label\n0.png,a\n", "list.csv:2: has no column 'image'; set data.image_column to one that is there"),
        ("image|label\n0.png|a\n", "has no column 'image'; its columns are set apart by '|': write commas"),
        ("LJ001|Hello, you|Hello, you\nLJ002|So, so|So, so\n", "names no columns; put a line of names above it"),
        ("image,label\n0.png\n", "list.csv:2: has not as many columns as the first line"),
        ("image,label\n0.png,\n", "list.csv:2: has no class"),
        ("image,label\n0.png,\u3000 \n", "list.csv:2: has no class"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "near").mkdir()
    for place in ("0.png", "near/1.png"):
        (tmp_path / place).write_bytes(stored(noise(1)))
    table = tmp_path / ("list.json" if content[0] == "{" else "list.csv")
    table.write_text(content)
    with pytest.raises(ConfigErrors) as refused:
        preflight(configured(tmp_path, f"data.paths=[{table}]", source="image_list"))
    assert told in str(refused.value)


def test_a_missing_model_folder_is_the_only_error(tmp_path: Path) -> None:
    root = folder_of_classes(tmp_path / "pictures", each=2)
    with pytest.raises(ConfigErrors) as refused:
        preflight(compose([*SHAPE[:3], "data=image_folder", f"data.paths=[{root}]", "model.path=/nowhere"])[0])
    assert [str(error).split("=")[0] for error in refused.value.errors] == ["model.path"]


@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder_of_classes(tmp_path / "pictures", each=2)
    for overrides, told in (
        (("data.paths=[nowhere]",), "data.paths=nowhere: is no folder here"),
        ((f"data.paths=[{root}/dark]",), "holds no folder of pictures"),
        ((f"data.paths=[{root}]", "data.image_size=8"), "data.image_size=8: the model's image_size is 16"),
        ((f"data.paths=[{root}]", "data.mean=[0.5,0.5]"), "data.mean=[0.5, 0.5]: the model has 3 channels"),
        ((f"data.paths=[{root}]", "model.config.num_channels=5"), "model.config.num_channels=5"),
        ((f"data.paths=[{root}]", "objective=causal_lm"), ") with data=chat_jsonl, data="),
        (
            (f"data.paths=[{root}]", "objective=causal_lm"),
            "model.type=vit: transformers has no causal language model vit; use a causal language model (model=",
        ),
        ((f"data.paths=[{root}]", "data.shift=-1"), "data.shift=-1"),
    ):
        with pytest.raises(BadInputError) as refused:
            preflight(configured(tmp_path, *overrides))
        assert told in str(refused.value), overrides
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    with pytest.raises(BadInputError, match=r"pip install 'mgpu_pipe\[image\]'"):
        preflight(configured(tmp_path, source="digits"))


def test_random_changes_are_keyed_by_seed_and_sample_alone(tmp_path: Path) -> None:
    root = folder_of_classes(tmp_path / "pictures")
    plain = configured(tmp_path, f"data.paths=[{root}]")
    changes = ("data.shift=3", "data.turn=20", "data.flip=true", "data.random_crop=0.4")
    config = configured(tmp_path, f"data.paths=[{root}]", *changes)
    assert prepare(config).digest != prepare(plain).digest
    samples, still = (prepare(one).open(one, "train") for one in (config, plain))
    indices, numbers = np.array([3, 5, 3]), np.array([7, 8, 9])
    together = samples.batch(indices, numbers)["pixel_values"]
    for place in range(3):
        alone = samples.batch(indices[place : place + 1], numbers[place : place + 1])["pixel_values"]
        assert (alone[0] == together[place]).all()
    assert not (together[0] == together[2]).all(), "the same picture at another time is changed otherwise"
    assert not (together == still.batch(indices, numbers)["pixel_values"]).all()
    held = [prepare(one).open(one, "validation") for one in (config, plain)]
    first, second = (one.batch(np.array([0]), np.array([-1]))["pixel_values"] for one in held)
    assert (first == second).all(), "held-out pictures are as they are"


def test_a_picture_that_changes_later_is_not_read(tmp_path: Path) -> None:
    root = folder_of_classes(tmp_path / "pictures")
    config = configured(tmp_path, f"data.paths=[{root}]", "data.validation_fraction=0")
    samples = prepare(config).open(config, "train")
    (root / "dark" / "0.png").write_bytes(stored(noise(9)))
    with pytest.raises(DataError, match=r"dark/0\.png: changed since its scan"):
        samples.batch(np.arange(24), np.arange(24))
    assert prepare(config).digest != ""
    os.unlink(root / "dark" / "1.png")
    with pytest.raises(DataError, match=r"dark/1\.png: cannot be read"):
        prepare(config).open(config, "train")
        samples.batch(np.array([1]), np.array([1]))


def test_a_file_is_hashed_again_only_where_its_state_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = list[bytes]()
    monkeypatch.setattr(fingerprint, "block_hash", lambda block: hashed.append(block) or block_hash(block))
    file, first, second = tmp_path / "file", b"one" * 9, b"two" * 9
    file.write_bytes(first)
    known = fingerprint.Fingerprint(len(first), (block_hash(first),))
    young = [fingerprint.read_part(file, known) for _ in range(2)]
    assert hashed == young == [first] * 2, "a file just written may change within a tick of the clock"
    monkeypatch.setattr(fingerprint, "_RACY_NS", 0)
    assert [fingerprint.read_part(file, known) for _ in range(3)] == [first] * 3 and len(hashed) == 3
    stat = file.stat()
    time.sleep(0.05)
    file.write_bytes(second)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(fingerprint.ChangedFileError):
        fingerprint.read_part(file, known)
    file.write_bytes(first)
    assert fingerprint.read_part(file, known) == first and len(hashed) == 5, "what it held before, at another time"


def test_many_pictures_are_looked_at_by_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder_of_classes(tmp_path / "pictures", each=30)
    (root / "dark" / "text.png").write_bytes(b"text")
    config = configured(tmp_path, f"data.paths=[{root}]", "data.on_bad_sample=skip", "data.tokenize_workers=2")
    alone = prepare(config).as_dict()
    monkeypatch.setattr(scan, "_POOL_FROM", 10)
    config.data.cache_dir = str(tmp_path / "other")
    several = prepare(config).as_dict()
    assert {**several, "folder": 0, "held_out_folder": 0} == {**alone, "folder": 0, "held_out_folder": 0}


def test_a_broken_row_of_a_list_is_left_out_unless_all_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "0.png").write_bytes(stored(noise(1)))
    (tmp_path / "1.png").write_bytes(stored(noise(2)))
    whole = ["0.png,a", "1.png,b"]
    broken = ["gone.png,a", "0.png,", ",a", "0.png", f"{'long' * 100}.png,b", ".,a"]
    said = [
        *("there is no file", "has no class", "the file is ''", "has not as many columns", "there is no file"),
        "there",
    ]
    csv, rows = tmp_path / "list.csv", tmp_path / "list.jsonl"
    csv.write_text("\n".join(["image,label", *whole, *broken]) + "\n")
    lines = [json.dumps({"image": path, "label": name}) for path, name in (row.split(",") for row in whole)]
    lines += ['{"image": "gone.png", "label": "a"}', '{"image": "0.png", "label": null}', '{"image": "0.png"}']
    rows.write_text("\n".join([*lines, '{"image": 3, "label": "a"}', '{"image": "0.png"', "[]"]))
    skip = ("data.on_bad_sample=skip", "data.validation_fraction=0")
    for path, bad in ((csv, 6), (rows, 6)):
        config = configured(tmp_path, f"data.paths=[{path}]", *skip, source="image_list")
        preflight(config)
        found = prepare(config)
        assert (found.train_samples, found.amounts()[-1]) == (2, (bad, "left out"))
    for line, reason in enumerate(said[:5], 4):
        assert f"{csv}:{line} {reason}" in caplog.text
    csv.write_text("\n".join(["image,label", *broken]) + "\n")
    with pytest.raises(ConfigErrors, match=r"list\.csv:2: there is no file"):
        preflight(configured(tmp_path, f"data.paths=[{csv}]", *skip, source="image_list"))


def test_only_folders_of_pictures_are_classes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = folder_of_classes(tmp_path / "pictures")
    plain = configured(tmp_path, f"data.paths=[{root}]")
    clean = prepare(plain)
    for number, place in enumerate(
        (".ipynb_checkpoints", "__MACOSX/dark", "dark/.thumbnails", "dark/__MACOSX", "@eaDir")
    ):
        (root / place).mkdir(parents=True)
        (root / place / "9.png").write_bytes(stored(noise(number)))
    (root / "dark" / "._0.png").write_bytes(b"what macOS keeps of a file")
    (root / "notes").mkdir()
    (root / "dark" / "loop").symlink_to(root / "dark")
    (root / "dark" / "up").symlink_to(root)
    (root / "light" / "other").symlink_to("loop")
    (root / "light" / "loop").symlink_to("other")
    preflight(plain)
    found = prepare(plain)
    assert found.digest == clean.digest and found.amounts() == [(24, "pictures"), (3, "classes")]
    elsewhere = tmp_path / "elsewhere"
    root.joinpath("stripes").rename(elsewhere)
    (root / "stripes").symlink_to(elsewhere)
    assert prepare(plain).digest == clean.digest, "a link that leads to a folder of pictures is followed"
    assert "left out" not in caplog.text
    (root / "cover.jpg").write_bytes(stored(noise(1), "JPEG"))
    prepare(plain)
    assert caplog.text.count(f"1 pictures in no folder of a class are left out: {root}/cover.jpg") == 1
    assert "no suffix" not in caplog.text
    (root / "light" / "Thumbs.db").write_bytes(b"1")
    for name in ("sub/0.psd", "1"):
        (root / "light" / name).parent.mkdir(exist_ok=True)
        (root / "light" / name).write_bytes(stored(noise(1), "JPEG"))
    prepare(plain)
    assert "2 files in folders of classes have no suffix of pictures (.png" in caplog.text
    assert f"left out: {root}/light/1, {root}/light/sub/0.psd\n" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("held", ["val", "Validation", "test"])
def test_folders_of_splits_are_no_classes(tmp_path: Path, held: str, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "set"
    folder_of_classes(root / "train")
    folder_of_classes(root / held, each=9)
    (root / "annotations").mkdir()
    config = configured(tmp_path, f"data.paths=[{root}]")
    preflight(config)
    found = prepare(config)
    named = configured(tmp_path, f"data.paths=[{root}/train]", f"data.validation_paths=[{root}/{held}]")
    assert found == prepare(named)
    assert (found.train_samples, found.held_out_samples) == (24, 27)  # type: ignore[attr-defined]
    assert f"the pictures in {root}/train are trained on, those in {root}/{held} held out" in caplog.text
    held_out = configured(tmp_path, f"data.paths=[{root}/train]", f"data.validation_paths=[{root}]")
    assert prepare(held_out) == found
    nothing = prepare(configured(tmp_path, f"data.paths=[{root}]", "data.validation_fraction=0"))
    assert (nothing.train_samples, nothing.held_out_samples) == (24, 0)  # type: ignore[attr-defined]
    folder_of_classes(root / "test", each=2, classes=("dark", "light", "stripes")) if held != "test" else None
    assert prepare(config) == found, "a test split is left alone where there is one for validation"
    (root / "annotations" / "0.png").write_bytes(stored(noise(1)))
    with pytest.raises(ConfigErrors, match=r"and also annotations; name the splits by data\.paths"):
        preflight(config)


def test_pictures_of_several_classes_are_named(tmp_path: Path) -> None:
    """Rows of boxes name a picture many times, and copies lie in two folders."""
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(stored(noise(max(number, 1))))
    rows = ["image,label", "0.png,a", "1.png,b", "2.png,a", "2.png,a", "3.png,b", "3.png,a"]
    for rest, told in ((rows[2:5], ""), (rows[1:], "2 pictures stand under several classes")):
        (tmp_path / "list.csv").write_text("\n".join([rows[0], *rest]))
        given = (f"data.paths=[{tmp_path}/list.csv]", "data.validation_fraction=0")
        prepared: Any = prepare(configured(tmp_path, *given, source="image_list"))
        assert prepared.told.startswith(told) and bool(prepared.told) == bool(told)
        assert prepared.train_samples == len(rest)


def test_a_class_of_held_out_pictures_alone_is_refused(tmp_path: Path) -> None:
    """Tiny ImageNet keeps its held-out pictures of all classes in one folder, ``val/images``."""
    folder_of_classes(tmp_path / "set" / "train")
    folder_of_classes(tmp_path / "set" / "val", classes=("images",))
    named = f"data.paths=[{tmp_path / 'set'}]"
    with pytest.raises(ConfigError, match="no training sample has the class 'images'; give training samples of it, or"):
        prepare(configured(tmp_path, named))
    assert prepare(configured(tmp_path, named, "data.classes=[dark,light,stripes,images]"))


def test_a_folder_that_links_to_itself_is_walked_once(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("1")
    (tmp_path / "self").symlink_to(tmp_path)
    assert match_glob(f"{tmp_path}/**/*.txt") == [f"{tmp_path}/1.txt"]


def test_a_glob_walks_each_folder_once(tmp_path: Path) -> None:
    for place in ("a/1.txt", "a/b/2.txt", ".hidden/3.txt", "c/d/4.txt"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(place)
    plain = match_glob(f"{tmp_path}/**/*.txt")
    assert plain == sorted(glob.glob(f"{tmp_path}/**/*.txt", recursive=True))
    for pattern in (
        *("**", "*/**/*.txt", "a/**", "**/b/*", "**/d/**", ".hidden/**/*.txt", "**/.hidden/*", "[ac]/**/[24].*"),
    ):
        expected = (name for name in glob.glob(f"{tmp_path}/{pattern}", recursive=True) if os.path.isfile(name))
        assert match_glob(f"{tmp_path}/{pattern}") == sorted(expected), pattern
    for number in range(12):
        (tmp_path / "a" / f"up{number}").symlink_to(tmp_path)
        (tmp_path / "c" / f"over{number}").symlink_to(tmp_path / "a")
    assert match_glob(f"{tmp_path}/**/*.txt") == plain
