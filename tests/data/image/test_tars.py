"""Tar files as WebDataset writes them. Oracle: the same pictures in folders and lists."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.prepare import prepare
from mgpu_pipe.errors import ConfigErrors, DataError
from tests.data.image.test_pictures import configured
from tests.support.pictures import folder_of_classes, noise, packed, samples_in, stored

PICTURE = stored(noise(1))


def of_tars(tmp_path: Path, *overrides: str, paths: str = "*.tar") -> RunConfig:
    return configured(tmp_path, f"data.paths=['{tmp_path}/{paths}']", *overrides, source="image_tar")


def test_any_number_of_tar_files_gives_what_a_folder_does(tmp_path: Path) -> None:
    root = folder_of_classes(tmp_path / "pictures")
    samples = samples_in(root)
    packed(tmp_path / "one.tar", [*samples, ("README", b"no sample"), ("._x.png", b"")])
    (tmp_path / "three").mkdir()
    for number in range(3):
        packed(tmp_path / "three" / f"{number}.tar", samples[16 * number : 16 * number + 16])
    packed(tmp_path / "json.tar", samples_in(root, "json", '{{"kind": "{}"}}'))
    configs = [
        configured(tmp_path, f"data.paths=[{root}]"),
        of_tars(tmp_path, paths="one.tar"),
        of_tars(tmp_path, paths="three/*.tar"),
        of_tars(tmp_path, "data.label_column=kind", paths="json.tar"),
    ]
    for config in configs:
        preflight(config)
    found = [prepare(config) for config in configs]
    assert len({one.digest for one in found}) == 1, "a run that began with one goes on with another"
    order = found[0].order(configs[0], found[0].train_samples).indices(17, 8)
    batches = [one.open(config, "train").batch(order, order) for one, config in zip(found, configs, strict=True)]
    for name, value in batches[0].items():
        assert all(torch.equal(batch[name], value) for batch in batches), name


def test_captions_of_tar_files_are_those_of_a_list(tmp_path: Path) -> None:
    root = folder_of_classes(tmp_path / "pictures", each=4)
    packed(tmp_path / "a.tar", samples_in(root, "txt", "a {} square\n"))
    lines = [f"{path},a {path.parent.name} square" for path in sorted(root.glob("*/*.png"))]
    (tmp_path / "list.csv").write_text("\n".join(["image,caption", *lines]) + "\n")
    shape = ("model.config.vision_config.image_size=16", "model.config.vision_config.patch_size=4", "data.seq_len=12")
    given = ("objective=contrastive", "model=clip_tiny", *shape, f"data.cache_dir={tmp_path / 'cache'}")
    batches = []
    for source, file in (("captions", "list.csv"), ("captioned_tar", "a.tar")):
        config = compose([*given, f"data={source}", f"data.paths=[{tmp_path / file}]"])[0]
        every = np.arange(8)
        batches.append(prepare(config).open(config, "train").batch(every, every))
    assert all(torch.equal(value, batches[1][name]) for name, value in batches[0].items())


def test_a_bad_picture_is_named_by_its_sample_and_one_that_changes_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = samples_in(folder_of_classes(tmp_path / "pictures"))
    samples[7], samples[11] = (samples[7][0], b"this is no picture\n"), (samples[11][0], b"")
    tar = packed(tmp_path / "a.tar", samples)
    with pytest.raises(DataError, match=r"a\.tar: dark-3 is no picture .*; .*a\.tar: dark-5 is empty: replace 2"):
        prepare(of_tars(tmp_path))
    config = of_tars(tmp_path, "data.on_bad_sample=skip", "data.validation_fraction=0")
    prepared = prepare(config)
    assert prepared.train_samples == 22 and "a.tar: dark-3 is no picture" in caplog.text
    content = bytearray(tar.read_bytes())
    content[content.index(samples[-1][1]) + 60] ^= 1
    tar.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.tar: changed since the pictures were looked through"):
        prepared.open(config, "train").batch(np.array([21]), np.array([0]))
    assert prepare(config).digest != prepared.digest


def cut(tar: Path, size: Callable[[int], int]) -> None:
    content = tar.read_bytes()
    tar.write_bytes(content[: size(len(content))])


def test_broken_tar_files_are_refused_in_one_line(tmp_path: Path) -> None:
    sample = [("0.png", PICTURE), ("0.cls", b"a")]
    many = sample + [("1.png", PICTURE), ("1.cls", b"b")]
    tar = tmp_path / "a.tar"
    header = (len(PICTURE) + 511) // 512 * 512 + 512

    def spoil(at: int) -> None:
        content = bytearray(packed(tar, many).read_bytes())
        content[at] ^= 0xFF
        tar.write_bytes(content)

    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: packed(tar, [("../0.png", PICTURE), ("../0.cls", b"a")]), "'../0.png': leads out of the tar file"),
        (lambda: packed(tar, [("/etc/0.png", PICTURE)]), "'/etc/0.png': leads out of the tar file"),
        (lambda: packed(tar, [("0.png", b"")], tarfile.SYMTYPE), "'0.png': is a link or no plain file"),
        (lambda: packed(tar, [("0.png", b"")], tarfile.LNKTYPE), "'0.png': is a link or no plain file"),
        (lambda: packed(tar, [("0.png", b"")], tarfile.FIFOTYPE), "'0.png': is a link or no plain file"),
        (lambda: packed(tar, sample[:1]), "0: has no member that ends with .cls or .json; pack it again"),
        (lambda: packed(tar, sample[1:]), "0: holds 0 pictures, not one"),
        (lambda: packed(tar, [*sample, ("0.jpg", PICTURE)]), "0: holds 2 pictures, not one"),
        (lambda: packed(tar, [sample[0], ("0.cls", b"")]), "0: the class is nothing"),
        (lambda: packed(tar, [sample[0], ("0.cls", b"\xff")]), "0: is not UTF-8"),
        (lambda: packed(tar, [sample[0], ("0.json", b'{"kind": 1}')]), "set data.label_column to one that is there"),
        (lambda: packed(tar, [sample[0], ("0.json", b"[")]), "0: is not valid JSON"),
        (lambda: packed(tar, [sample[0], ("0.cls", b"a" * (2 << 20))]), "0: its class has 2097152 bytes"),
        (lambda: packed(tar, []), "holds no sample"),
        (lambda: tar.write_bytes(gzip.compress(packed(tar, many).read_bytes())), "is no whole, uncompressed tar file"),
        (lambda: tar.write_bytes(b"no tar file\n" * 100), "is no whole, uncompressed tar file"),
        (lambda: cut(packed(tar, many), lambda size: 512 + len(PICTURE) // 2), "'0.png': is cut short"),
        (lambda: cut(packed(tar, many), lambda size: header), f"breaks off at byte {header}"),
        (lambda: cut(packed(tar, many), lambda size: header + 100), f"breaks off at byte {header}"),
        (lambda: spoil(header + 3), f"breaks off at byte {header}"),
        (lambda: spoil(3), "is no whole, uncompressed tar file"),
    ]
    for make, told in cases:
        make()
        with pytest.raises(DataError) as refused:
            prepare(of_tars(tmp_path))
        said = str(refused.value)
        assert told in said and "\n" not in said and said.startswith(str(tar)), (told, said)
    with pytest.raises(ConfigErrors, match="is no whole, uncompressed tar file"):
        preflight(of_tars(tmp_path))
