"""``generate --device-map`` on the host and the disk. The oracle of tokens is the same command without the option; of
maps, sums by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from mgpu_pipe.cli.main import main
from mgpu_pipe.errors import BadInputError, ConfigErrors
from mgpu_pipe.inference import generation
from mgpu_pipe.inference.device_map import DISK, Part, map_by_file, memory_limits, plan_map
from tests.inference.support import write_run, write_texts

PROMPT = ("--prompt", "the quick brown", "--prompt", "an old", "--temperature", "0", "--max-new-tokens", "20")
FAMILIES = {"llama": {"num_hidden_layers": 6}, "gpt2": {"n_layer": 6}, "mixtral": {"num_hidden_layers": 6}}
"""Among them one with tied embeddings and one with experts."""


def nbytes_of(model: PreTrainedModel) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """A run's folder of each family, and the bytes of its model."""
    folder = tmp_path_factory.mktemp("placed")
    texts = write_texts(folder / "texts", 6)
    return {
        family: (folder / family, nbytes_of(write_run(folder / family, family, texts, folder / "cache", **fields)))
        for family, fields in FAMILIES.items()
    }


def resident_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the bytes of weights in memory at the start and at the end of each generation."""
    seen = list[int]()
    original = generation.generate_text

    def watched(model: PreTrainedModel, *args: Any, **options: Any) -> list[str]:
        seen.append(sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta))
        texts = original(model, *args, **options)
        seen.append(sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta))
        return texts

    monkeypatch.setattr(generation, "generate_text", watched)
    return seen


def table_of(text: str) -> dict[str, int]:
    """The bytes of each line of a printed table."""
    rows = re.findall(r"^(cpu|disk|cuda:\d+|total) +([\d,]+)", text, re.MULTILINE)
    return {device: int(nbytes.replace(",", "")) for device, nbytes in rows}


@pytest.mark.parametrize("family", FAMILIES)
def test_half_the_memory_and_the_disk_give_the_same_tokens(
    runs: dict[str, tuple[Path, int]],
    family: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, nbytes = runs[family]
    export = tmp_path / "exported"
    assert main(["export", str(run), "--out", str(export)]) == 0
    capfd.readouterr()
    for folder in (run, export):
        words = ["generate", str(folder), *PROMPT]
        assert main(words) == 0
        expected = capfd.readouterr().out
        resident = resident_bytes(monkeypatch)
        place = ["--max-memory", f"cpu={nbytes // 2}", "--offload-folder", str(tmp_path / "disk")]
        assert main([*words, "--device-map", "auto", *place]) == 0
        printed = capfd.readouterr()
        assert printed.out == expected
        table = table_of(printed.err)
        assert table["cpu"] + table["disk"] == table["total"] == nbytes
        assert 0 < table["cpu"] <= nbytes // 2
        assert resident == [table["cpu"]] * 2
        assert not (tmp_path / "disk").exists()


def test_a_file_places_the_modules_that_it_names(
    runs: dict[str, tuple[Path, int]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, nbytes = runs["llama"]
    assert main(["generate", str(run), *PROMPT]) == 0
    expected = capfd.readouterr().out
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"": "disk", "model.layers": "cpu", "model.layers.3": "disk"}))
    words = ["generate", str(run), *PROMPT, "--device-map", str(file)]
    assert main(words) == 2
    assert re.search(r"bytes of weights go to the disk; add --offload-folder", capfd.readouterr().err)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    assert main([*words, "--offload-folder", str(tmp_path / "used")]) == 2
    assert "is not empty; choose a new folder" in capfd.readouterr().err
    assert main([*words, "--offload-folder", str(tmp_path / "disk")]) == 0
    printed = capfd.readouterr()
    assert printed.out == expected
    table = table_of(printed.err)
    assert table["cpu"] + table["disk"] == table["total"] == nbytes


def test_a_map_is_planned_for_devices_that_are_not_here(
    runs: dict[str, tuple[Path, int]], capfd: pytest.CaptureFixture[str]
) -> None:
    run, nbytes = runs["llama"]
    words = ["generate", str(run), "--device-map", "balanced", "--max-memory", "0=1GB,1=1GB"]
    assert main([*words, "--prompt", "the"]) == 2
    assert "cuda:0 is not here" in capfd.readouterr().err
    assert main([*words, "--print"]) == 0
    table = table_of(capfd.readouterr().out)
    assert table["cuda:0"] + table["cuda:1"] == table["total"] == nbytes
    assert abs(table["cuda:0"] - table["cuda:1"]) < nbytes / 6


def test_a_wrong_file_is_refused_line_by_line(
    runs: dict[str, tuple[Path, int]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "map.yaml"
    words = ["generate", str(runs["llama"][0]), "--prompt", "the", "--device-map", str(file)]
    file.write_text("model.embed_tokens: tpu\nlm_head: disc\n")
    assert main(words) == 2
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition("map.yaml: ")[2].partition(";")[0] for line in lines] == [
        "model.embed_tokens: tpu: no such device",
        "lm_head: disc: no such device",
    ]
    file.write_text("model.layers: cpu\nmodel.layer: cpu\nmodel.layers.0.mlp: disk\nlm_head: cpu\nmodel.norm: cpu\n")
    assert main(words) == 2
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition("map.yaml: ")[2].partition(";")[0] for line in lines] == [
        "model.layer: the model has no such module",
        "model.layers.0.mlp: cuts model.layers.0, which runs on one device",
        "model.embed_tokens: has weights and no device",
    ]
    file.write_text("- model\n")
    assert main(words) == 2
    assert "maps no modules to devices" in capfd.readouterr().err


def parts_of(*sizes: int) -> list[Part]:
    return [Part((f"layers.{number}",), size) for number, size in enumerate(sizes)]


def planned(sizes: Sequence[int], is_balanced: bool = False, **limits: int) -> list[str]:
    by_device = {name.replace("gpu", "cuda:"): limit for name, limit in limits.items()}
    return list(plan_map(parts_of(*sizes), by_device, is_balanced).devices)


def test_maps_are_those_by_hand() -> None:
    assert planned([4, 4, 4], gpu0=8, gpu1=8) == ["cuda:0", "cuda:0", "cuda:1"]
    assert planned([2, 1, 1, 1, 1, 2], True, gpu0=8, gpu1=8) == ["cuda:0"] * 3 + ["cuda:1"] * 3
    assert planned([2, 1, 1, 1, 1, 2], True, gpu0=3, gpu1=8) == ["cuda:0"] * 2 + ["cuda:1"] * 4
    assert planned([4, 4, 4], cpu=12) == ["cpu"] * 3
    assert planned([4, 4, 4], cpu=11) == ["cpu", DISK, DISK], "the host keeps room for a part of the disk"
    assert planned([4, 4, 4], gpu0=8, cpu=4) == ["cuda:0", "cpu", DISK], "the GPU computes what the host holds"
    assert planned([1, 8, 8, 1], cpu=10) == ["cpu", DISK, DISK, "cpu"], (
        "a large part that does not fit keeps no other away"
    )
    with pytest.raises(BadInputError, match=r"cpu has 3 bytes for weights, and layers\.0 alone takes 4"):
        planned([4, 2], cpu=3)
    assert memory_limits("cpu=2GiB,10=1GB,cuda:2=1GB") == {"cuda:2": 10**9, "cuda:10": 10**9, "cpu": 2**31}


def test_modules_that_share_weights_are_on_one_device() -> None:
    parts = [Part(("embed", "head"), 4), Part(("layers.0",), 4)]
    names = ["", "embed", "head", "layers", "layers.0"]
    with pytest.raises(ConfigErrors, match="embed and head: share weights; give them one device"):
        map_by_file(parts, {"": "cpu", "head": DISK}, names, Path("map"))
