"""Tar files as WebDataset writes them. Oracle: the same pictures in folders and lists."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest
import torch

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.containers import tar_members
from mgpu_pipe.data.images.prepare_images import PreparedImages
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.errors import ConfigErrors, DataError
from tests.data.image.test_pictures import configured
from tests.support.fuzzing import changed
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
    order = found[0].order(configs[0].seed, configs[0].data, found[0].train_samples).indices(17, 8)
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
    with pytest.raises(DataError, match=r"a\.tar: changed since its scan"):
        prepared.open(config, "train").batch(np.array([21]), np.array([0]))
    assert prepare(config).digest != prepared.digest


def cut(tar: Path, size: Callable[[int], int]) -> None:
    content = tar.read_bytes()
    tar.write_bytes(content[: size(len(content))])


@pytest.mark.slow
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
        (lambda: packed(tar, [("../0.png", PICTURE), ("../0.cls", b"a")]), "'../0.png' leads out of the tar file"),
        (lambda: packed(tar, [("/etc/0.png", PICTURE)]), "'/etc/0.png' leads out of the tar file"),
        (lambda: packed(tar, [("0.png", b"")], tarfile.SYMTYPE), "'0.png' is a link or no plain file"),
        (lambda: packed(tar, [("0.png", b"")], tarfile.LNKTYPE), "'0.png' is a link or no plain file"),
        (lambda: packed(tar, [("0.png", b"")], tarfile.FIFOTYPE), "'0.png' is a link or no plain file"),
        (lambda: packed(tar, sample[:1]), "0 has no member that ends with .cls or .json"),
        (lambda: packed(tar, sample[1:]), "0 holds 0 pictures, not one"),
        (lambda: packed(tar, [*sample, ("0.jpg", PICTURE)]), "0 holds 2 pictures, not one"),
        (lambda: packed(tar, [sample[0], ("0.cls", b"")]), "0 has no class"),
        (lambda: packed(tar, [sample[0], ("0.cls", b"\xff")]), "0 is not UTF-8"),
        (lambda: packed(tar, [sample[0], ("0.json", b'{"kind": 1}')]), "set data.label_column to one that is there"),
        (lambda: packed(tar, [sample[0], ("0.json", b"[")]), "0 is not valid JSON"),
        (lambda: packed(tar, [sample[0], ("0.cls", b"a" * (2 << 20))]), "0 has a class of 2097152 bytes"),
        (lambda: packed(tar, []), "holds no sample"),
        (
            lambda: tar.write_bytes(gzip.compress(packed(tar, many).read_bytes())),
            "is a gzip file, not an uncompressed tar",
        ),
        (lambda: tar.write_bytes(b"no tar file\n" * 100), "is no tar file"),
        (lambda: cut(packed(tar, many), lambda size: 512 + len(PICTURE) // 2), "'0.png' is cut short"),
        (lambda: cut(packed(tar, many), lambda size: header), f"breaks off at byte {header}"),
        (lambda: cut(packed(tar, many), lambda size: header + 100), f"breaks off at byte {header}"),
        (lambda: spoil(header + 3), f"breaks off at byte {header}"),
        (lambda: spoil(3), "is no tar file"),
    ]
    config = of_tars(tmp_path)
    for make, told in cases:
        make()
        with pytest.raises(DataError) as refused:
            prepare(config)
        said = str(refused.value)
        assert told in said and "\n" not in said and said.startswith(str(tar)), (told, said)
    with pytest.raises(ConfigErrors, match="is no tar file; replace the file"):
        preflight(config)


def test_what_is_wrong_in_a_tar_file_is_left_out_and_the_rest_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    picture = [stored(noise(number)) for number in range(8)]
    members = [
        part
        for number in range(8)
        for part in ((f"{number}.png", picture[number]), (f"{number}.cls", b"ab"[number % 2 :][:1]))
    ]
    packed(tmp_path / "a.tar", [*members[:9], ("5.png", b"x"), *members[12:15], ("7.cls", b"")])
    cut(packed(tmp_path / "b.tar", members), lambda size: 4 * 1024 + 100)
    (tmp_path / "c.tar").write_bytes(b"no tar file\n" * 100)
    config = of_tars(tmp_path, "data.on_bad_sample=skip", "data.validation_fraction=0")
    preflight(config)
    prepared = prepare(config)
    assert prepared.bad_samples == 5, caplog.text
    for said in (
        "a.tar: 4 has no member",
        "a.tar: 5 has no member",
        "a.tar: 7 has no class",
        "b.tar breaks off at byte",
    ):
        assert said in caplog.text, said
    assert prepared.train_samples == 5 + 2
    with pytest.raises(DataError, match="replace 5 pictures"):
        prepare(of_tars(tmp_path))


def test_the_second_archive_of_a_file_is_read_too(tmp_path: Path) -> None:
    """As ``cat a.tar b.tar`` makes it; both have a sample of one name, which stay two."""
    halves = [[("0.png", stored(noise(seed))), ("0.cls", name)] for seed, name in ((1, b"a"), (2, b"b"))]
    both = b"".join(packed(tmp_path / "part", half).read_bytes() for half in halves)
    (tmp_path / "a.tar").write_bytes(both)
    prepared = prepare(of_tars(tmp_path, "data.validation_fraction=0"))
    assert prepared.train_samples == 2
    (tmp_path / "a.tar").write_bytes(both + b"what is this?" * 50)
    with pytest.raises(DataError, match=r"a\.tar breaks off at byte 20480: what stands there is no header"):
        prepare(of_tars(tmp_path))


def numbered(value: int, field: bytes = b"\xff") -> bytes:
    """A size as GNU tar writes one that no eleven octal digits hold."""
    return field + (value % 256**11).to_bytes(11, "big")


def headed(name: bytes, size: bytes, kind: bytes) -> bytes:
    """A header with a right sum."""
    block = name.ljust(100, b"\0") + b"0000644\0" * 3 + size + b"0" * 12 + b" " * 8 + kind
    block = (block.ljust(257, b"\0") + b"ustar\x0000").ljust(512, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (headed(b"0.png", numbered(-1024), b"0"), "a member of no possible size at byte 0"),
        (
            headed(b"0.png", b"0" * 11 + b" ", b"0") + headed(b"1", numbered(-1024), b"x"),
            "no possible size at byte 512",
        ),
        (headed(b"0.png", numbered(1 << 70, b"\x80"), b"0"), "'0.png' is cut short"),
        (headed(b"x", numbered(1 << 40, b"\x80"), b"x"), "has a header of 1099511627776 bytes"),
        (headed(b"././@LongLink", b"%011o " % 4, b"L") + b"name".ljust(512, b"\0"), "breaks off at byte 1024"),
        ((headed(b"././@LongLink", b"%011o " % 4, b"L") + b"name".ljust(512, b"\0")) * 20_000, "more than 8 headers"),
        ((headed(b"x", b"%011o " % 12, b"x") + b"12 path=a/b\n".ljust(512, b"\0")) * 20_000, "more than 8 headers"),
        (
            headed(b"x", b"%011o " % 12, b"x") + b"99 path=a/b\n".ljust(512, b"\0"),
            "pax header at byte 0 that cannot be",
        ),
        (
            headed(b"x", b"%011o " % 12, b"x")
            + b"12 size=-24\n".ljust(512, b"\0")
            + headed(b"a", b"0" * 11 + b" ", b"0"),
            "no possible",
        ),
    ],
)
def test_headers_that_lead_back_or_extend_each_other_are_refused(tmp_path: Path, content: bytes, told: str) -> None:
    """CVE-2025-8194 and its like: Python's ``tarfile`` never ends here, or ends in a RecursionError."""
    (tmp_path / "a.tar").write_bytes(content + bytes(1024) * (b"breaks" not in told.encode()))
    with pytest.raises(DataError, match=told):
        prepare(of_tars(tmp_path))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_that_tarfile_finds(tmp_path: Path, form: int) -> None:
    names = ["a.txt", "d/" * 60 + "deep.txt", "\u00fcber/\u6f22.txt", "empty", "x" * 99]
    names += [] if form == tarfile.USTAR_FORMAT else ["long" * 80 + ".txt"]
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=form) as file:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = 0 if name == "empty" else 700 * number + 1
            file.addfile(info, io.BytesIO(bytes(info.size)))
        file.add(tmp_path, "folder", recursive=False)
    with tarfile.open(path) as file, open(path, "rb") as content:
        expected = [(one.name, one.isreg(), one.isdir(), one.offset_data, one.size) for one in file]
        found = [tuple(one[:5]) for one in tar_members(content, path.stat().st_size)]
    assert [(name.rstrip("/"), *rest) for name, *rest in found] == expected  # type: ignore[attr-defined]


def test_members_of_archives_that_gnu_tar_wrote(tmp_path: Path) -> None:
    """Of files that nobody here made, in each of its formats."""
    tar = which("tar")
    if tar is None:
        pytest.skip("GNU tar writes its formats: apt-get install tar")
    source = Path(json.__file__).parent
    for form in ("v7", "oldgnu", "gnu", "ustar", "posix"):
        path = tmp_path / f"{form}.tar"
        subprocess.run([tar, f"--format={form}", "-cf", path, "-C", source.parent, source.name], check=True)
        with tarfile.open(path) as file, open(path, "rb") as content:
            expected = [(one.name, one.isreg(), one.offset_data, one.size) for one in file]
            members = list(tar_members(content, path.stat().st_size))
        assert [(one.name.rstrip("/"), one.is_file, one.offset, one.size) for one in members] == expected, form


def spoiled_tars(folder: Path, number: int) -> None:
    members = [part for at in range(3) for part in ((f"{at}.png", PICTURE), (f"{at}.cls", b"ab"[at % 2 :][:1]))]
    whole = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        long = [(f"{'deep/' * 30}{at}{ending}", content) for at, (ending, content) in enumerate(((".png", PICTURE),))]
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w", format=form) as file:
            for name, raw in [*members, *long]:
                info = tarfile.TarInfo(name)
                info.size = len(raw)
                info.pax_headers = {"comment": "as pax has it"} if form == tarfile.PAX_FORMAT else {}
                file.addfile(info, io.BytesIO(raw))
        whole.append(content.getvalue()[: 512 * 24])
    for at in range(number):
        (folder / f"{at}.tar").write_bytes(changed(whole, at))
    packed(folder / "whole.tar", members)


def read_spoiled(tmp_path: Path, number: int) -> PreparedImages:
    spoiled_tars(tmp_path, number)
    config = of_tars(tmp_path, "data.on_bad_sample=skip")
    preflight(config)
    prepared = prepare(config)
    assert isinstance(prepared, PreparedImages)
    return prepared


@pytest.mark.slow
def test_spoiled_tar_files_never_end_a_run(tmp_path: Path) -> None:
    prepared = read_spoiled(tmp_path, 150)
    assert prepared.bad_samples > 100 and prepared.num_pictures > 100


@pytest.mark.exhaustive
def test_ten_thousand_spoiled_tar_files_never_end_a_run(tmp_path: Path) -> None:
    assert read_spoiled(tmp_path, 10_000).num_pictures > 1000
