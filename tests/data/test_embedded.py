"""Pictures and recordings in the rows of a table. Oracle: the same files, named by a list."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.listen import check_recordings
from mgpu_pipe.data.images.chat_rows import rows_of
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.errors import BadInputError, DataError
from tests.data.image.test_pictures import configured
from tests.support.needs import need_speech
from tests.support.pictures import folder_of_classes, noise, stored
from tests.support.sounds import RATE, list_of_tones


def uri(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def tables(folder: Path, column: str, rows: list[dict[str, Any]]) -> list[Path]:
    """The rows with what is in the files that they name: as ``datasets`` writes it, as bytes, and as URIs."""
    forms = {"struct": lambda raw, name: {"bytes": raw, "path": name}, "bytes": lambda raw, name: raw}
    paths = []
    for form, hold in forms.items():
        held = [{**row, column: hold((folder / row[column]).read_bytes(), row[column])} for row in rows]
        path = folder / f"{form}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(held), path)
        paths.append(path)
    lines = [json.dumps({**row, column: uri((folder / row[column]).read_bytes())}) for row in rows]
    (folder / "uris.jsonl").write_text("\n".join(lines) + "\n")
    return [*paths, folder / "uris.jsonl"]


def batches(configs: list[RunConfig]) -> list[dict[str, torch.Tensor]]:
    every = np.arange(12)
    return [prepare(config).open(config, "train").batch(every, every) for config in configs]


def test_pictures_in_rows_are_those_that_a_list_names(tmp_path: Path) -> None:
    root = folder_of_classes(tmp_path / "pictures", each=6)
    rows = [
        {"image": str(path.relative_to(root)), "label": path.parent.name, "thumbnail": "x"}
        for path in sorted(root.glob("*/*.png"))
    ]
    (root / "list.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    configs = [
        configured(tmp_path, f"data.paths=[{path}]", source="image_list")
        for path in (root / "list.jsonl", *tables(root, "image", rows))
    ]
    for config in configs:
        preflight(config)
    first, *others = batches(configs)
    for other in others:
        assert all(torch.equal(value, other[name]) for name, value in first.items())
    assert len({prepare(config).digest for config in configs}) == 1, "a run goes on with the others"


@pytest.mark.slow
def test_recordings_in_rows_are_those_that_a_list_names(tmp_path: Path) -> None:
    need_speech()
    table = list_of_tones(tmp_path, each=4)
    rows = [dict(zip(("path", "text"), line.split(","), strict=True)) for line in table.read_text().splitlines()[1:]]
    given = ("objective=ctc", "data=audio_list", "model=wav2vec2_tiny", f"data.cache_dir={tmp_path / 'cache'}")
    configs = [
        compose([*given, f"data.sampling_rate={RATE}", f"data.paths=[{path}]"])[0]
        for path in (table, *tables(tmp_path, "path", rows))
    ]
    for config in configs:
        check_recordings(config.model, config.data)
    first, *others = batches(configs)
    for other in others:
        assert all(torch.equal(value, other[name]) for name, value in first.items())


def test_a_bad_picture_is_named_by_its_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"image": {"bytes": stored(noise(at)), "path": None}, "label": "ab"[at % 2]} for at in range(8)]
    rows[3]["image"], rows[5]["image"] = {"bytes": b"\xffno picture", "path": "a.png"}, None
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    given = (f"data.paths=[{tmp_path / 'a.parquet'}]", "data.validation_fraction=0")
    with pytest.raises(BadInputError, match=r"a\.parquet: row 6: the file is None, not a path"):
        preflight(configured(tmp_path, *given, source="image_list"))
    skipping = configured(tmp_path, *given, "data.on_bad_sample=skip", source="image_list")
    preflight(skipping)
    assert prepare(skipping).train_samples == 6
    assert "a.parquet: row 4 is no picture" in caplog.text and str(tmp_path / "cache") not in caplog.text
    (tmp_path / "a.jsonl").write_text(json.dumps({"image": "data:image/png;base64,a", "label": "a"}))
    with pytest.raises(DataError, match=r"a\.jsonl:1: has a data: URI that cannot be read"):
        prepare(configured(tmp_path, f"data.paths=[{tmp_path / 'a.jsonl'}]", source="image_list"))


def test_conversations_hold_their_pictures(tmp_path: Path) -> None:
    """Each form of a row, twice: as it names its picture, and as it holds it."""
    raw = stored(noise(1))
    (tmp_path / "1.png").write_bytes(raw)
    said = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "noise"}]
    held = [
        {"messages": said, "images": [{"bytes": raw, "path": "1.png"}]},
        {"messages": said, "images": [raw]},
        {"messages": said, "image": {"bytes": raw, "path": None}},
    ]
    config = compose(["data=picture_chats", "data.paths=[x]", "model=llava_tiny", "objective=causal_lm"])[0]
    kept = list[bytes]()

    def keep(content: bytes) -> str:
        kept.append(content)
        return str(tmp_path / "1.png")

    for at, row in enumerate(held):
        path = tmp_path / f"{at}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
        (found,) = rows_of(config.data, [path], keep=keep)  # type: ignore[arg-type]
        assert [one.read_bytes() for one in found.pictures] == [raw] and kept.pop() == raw, row
    part = {"type": "image_url", "image_url": {"url": uri(raw)}}
    asked = {"role": "user", "content": [part, {"type": "text", "text": "what?"}]}
    plain = "data:image/png," + quote_from_bytes(raw)
    for row in ({"messages": [asked, said[1]]}, {"messages": said, "images": [plain]}):
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        (found,) = rows_of(config.data, [tmp_path / "a.jsonl"], keep=keep)  # type: ignore[arg-type]
        assert len(found.pictures) == 1 and kept.pop() == raw


def test_texts_and_uris_name_their_files(tmp_path: Path) -> None:
    """Qwen-VL's rows name a picture in the text of a message, and those of Qwen2.5-VL by a URI."""
    path = tmp_path / "a b%.png"
    path.write_bytes(stored(noise(1)))
    config = compose(["data=picture_chats", "data.paths=[x]", "model=llava_tiny", "objective=causal_lm"])[0]
    answer = {"from": "gpt", "value": "No <img>tag</img>."}
    for text, images in (
        (f"1: <img>{path.name}</img> <img> {path} </img>", []),
        ("1: <image> <image>", [path.as_uri(), f"FILE://localhost{path.as_uri()[7:]}"]),
    ):
        row = {"conversations": [{"from": "user", "value": text}, answer], **({"images": images} if images else {})}
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        (found,) = rows_of(config.data, [tmp_path / "a.jsonl"])  # type: ignore[arg-type]
        assert found.pictures == (path, path) and found.text.count("1: <image> <image>") == 1
    (tmp_path / "list.csv").write_text(f"image,label\n{path.as_uri()},a\n{path.name},b\n")
    given = configured(
        tmp_path, f"data.paths=[{tmp_path / 'list.csv'}]", "data.validation_fraction=0", source="image_list"
    )
    assert prepare(given).train_samples == 2
