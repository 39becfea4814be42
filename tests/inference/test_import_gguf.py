"""``mgpu-pipe import`` of GGUF files. Oracle: transformers' own reader of GGUF."""

from __future__ import annotations

import random
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mgpu_pipe.cli.main import main
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.gguf.file import GgufFile
from mgpu_pipe.inference.gguf.model_metadata import settings_of
from mgpu_pipe.inference.import_weights import open_gguf
from tests.inference.gguf_files import ROWS, write_llama
from tests.support.real_folders import need_smollm2, need_smollm2_file

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]


def read_by_transformers(file: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def imported(file: Path, out: Path) -> PreTrainedModel:
    assert main(["import", "--from", str(file), "--out", str(out)]) == 0
    return AutoModelForCausalLM.from_pretrained(out, local_files_only=True, dtype=torch.float32).eval()


@torch.no_grad()
def same_logits(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    ids = torch.randint(0, expected.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found(ids).logits, expected(ids).logits, atol=1e-5, rtol=1e-5)


def opened(file: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """The tensors of an import, without its last check."""
    scratch.mkdir(exist_ok=True)
    stored = open_gguf(file, scratch)
    return {name: stored.read(name, torch.float32) for name in stored.model.state_dict()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_weights_is_read_as_transformers_reads_it(kind: str, tmp_path: Path) -> None:
    file = write_llama(tmp_path / "model.gguf", kind)
    found, expected = opened(file, tmp_path / "scratch"), read_by_transformers(file).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.slow
def test_a_file_becomes_a_folder_with_its_tokenizer_that_runs_start_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write_llama(tmp_path / "model.gguf"), tmp_path / "out"
    same_logits(imported(file, out), read_by_transformers(file))
    assert f"train on: mgpu-pipe model=hf model.path={out}" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("abcd cd<|end|>").input_ids == [1, 13, 10, 12, 0]
    assert tokenizer.eos_token == "<|end|>" and "<|user|>" in tokenizer.chat_template
    settings = ["data.seq_len=32", "trainer.max_steps=1", "data.tokenize_workers=1"]
    assert main(["check", "model=hf", f"model.path={out}", *settings]) == 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_published_model_keeps_its_logits_and_cuts_digits_apart(tmp_path: Path) -> None:
    out = need_smollm2()
    file = need_smollm2_file()
    found = AutoModelForCausalLM.from_pretrained(out, local_files_only=True, dtype=torch.float32).eval()
    same_logits(found, read_by_transformers(file))
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert [tokenizer.decode(number) for number in tokenizer("in 2024").input_ids] == ["in", " ", "2", "0", "2", "4"]
    turns = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False).endswith("<|im_start|>user\nHi<|im_end|>\n")


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """At most ``more`` bytes of addresses beyond those in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refused(file: Path, scratch: Path) -> str:
    with pytest.raises(BadInputError) as problem:
        opened(file, scratch)
    assert "\n" not in str(problem.value) and str(file) in str(problem.value)
    return str(problem.value)


@pytest.mark.parametrize("kept", [0, 3, 8, 23, 100, 700, 1500, -70_000, -4096, -1])
def test_a_cut_off_file_is_refused(kept: int, tmp_path: Path) -> None:
    file = write_llama(tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:kept])
    assert refused(file, tmp_path / "scratch")


@pytest.mark.parametrize("place", [8, 16, 24])
@pytest.mark.parametrize("count", [2**63, 2**64 - 1, 2**40])
def test_counts_beyond_the_file_are_refused_before_anything_is_allocated(
    place: int, count: int, tmp_path: Path
) -> None:
    """Of tensors, of metadata, of the first key's bytes."""
    file = write_llama(tmp_path / "model.gguf")
    raw = bytearray(file.read_bytes())
    struct.pack_into("<Q", raw, place, count)
    file.write_bytes(raw)
    assert "is cut off" in refused(file, tmp_path / "scratch")


def test_a_list_beyond_the_file_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    file = write_llama(tmp_path / "model.gguf")
    raw = bytearray(file.read_bytes())
    for key in (b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type"):
        damaged = bytearray(raw)
        struct.pack_into("<Q", damaged, raw.index(key) + len(key) + 8, 2**60)
        file.write_bytes(damaged)
        assert "is cut off" in refused(file, tmp_path / "scratch")


def test_damaged_headers_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    file = write_llama(tmp_path / "model.gguf")
    raw, chance = file.read_bytes(), random.Random(0)
    end = raw.index(b"blk.0.ffn_down.weight") + 60
    for number in range(60):
        damaged = bytearray(raw)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(end)] = chance.choice([0, 1, 9, 127, 128, 255, chance.randrange(256)])
        file.write_bytes(damaged)
        scratch = tmp_path / f"scratch{number}"
        scratch.mkdir()
        try:
            open_gguf(file, scratch)
        except BadInputError as problem:
            assert "\n" not in str(problem)


def test_a_weight_that_is_missing_or_not_finite_is_refused(tmp_path: Path) -> None:
    file = write_llama(tmp_path / "model.gguf", leave_out="blk.0.ffn_up")
    assert "blk.0.ffn_up.weight is missing" in refused(file, tmp_path / "scratch")
    file = write_llama(tmp_path / "model.gguf")
    entry = GgufFile(file).tensors["blk.0.ffn_up.weight"]
    raw = bytearray(file.read_bytes())
    struct.pack_into("<f", raw, entry.offset, float("nan"))
    file.write_bytes(raw)
    assert "blk.0.ffn_up.weight holds numbers that are not finite" in refused(file, tmp_path / "scratch2")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("llama.block_count", 2**31 - 1, "fewer tensors than llama.block_count"),
        ("llama.block_count", 0, "not a number above 0"),
        ("llama.feed_forward_length", 128, "blk.0.ffn_gate.weight has the shape"),
        ("llama.rope.dimension_count", 8, "rotates 8 of a head's 16 values"),
        ("tokenizer.ggml.eos_token_id", ROWS, f"has {ROWS} as eos_token_id and {ROWS} tokens"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(key: str, value: int, expected: str, tmp_path: Path) -> None:
    file = write_llama(tmp_path / "model.gguf")
    raw = bytearray(file.read_bytes())
    struct.pack_into("<I", raw, raw.index(key.encode()) + len(key) + 4, value)
    file.write_bytes(raw)
    assert expected in refused(file, tmp_path / "scratch")


@pytest.mark.parametrize(
    ("numbers", "kind", "expected"),
    [
        ({"rope.scaling.factor": 4.0}, None, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, None, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scale_linear": 2.0, "rope.scaling.factor": 4.0}, "linear", {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 4.0}, "none", {"rope_type": "default"}),
        ({"rope.scaling.factor": 0.0}, None, {"rope_type": "default"}),
        ({}, "linear", {"rope_type": "default"}),
    ],
)
def test_rotations_are_scaled_as_llama_cpp_scales_them(
    numbers: dict[str, float], kind: str | None, expected: dict[str, object], tmp_path: Path
) -> None:
    def scale(writer: GGUFWriter) -> None:
        for key, value in numbers.items():
            writer.add_float32(f"llama.{key}", value)
        if kind is not None:
            writer.add_string("llama.rope.scaling.type", kind)

    settings = settings_of(GgufFile(write_llama(tmp_path / "model.gguf", tweak=scale)), "llama")
    assert settings["rope_parameters"] == {"rope_theta": 50_000.0, **expected}


def test_heads_of_an_odd_size_are_refused(tmp_path: Path) -> None:
    def shorten(writer: GGUFWriter) -> None:
        writer.add_key_length(3)

    file = write_llama(tmp_path / "model.gguf", tweak=shorten)
    raw = bytearray(file.read_bytes())
    key = b"llama.rope.dimension_count"
    struct.pack_into("<I", raw, raw.index(key) + len(key) + 4, 3)
    file.write_bytes(raw)
    assert "rotates heads of 3 values" in refused(file, tmp_path / "scratch")


def test_divisors_of_frequencies_are_read_or_refused(tmp_path: Path) -> None:
    """Eight for a head of 16 values, as many as its pairs; with linear scaling llama.cpp takes both, which none has."""

    def divide(writer: GGUFWriter, count: int = 8) -> None:
        writer.add_tensor("rope_freqs.weight", np.ones(count, np.float32))

    def divide_and_scale(writer: GGUFWriter) -> None:
        divide(writer)
        writer.add_float32("llama.rope.scaling.factor", 4.0)

    file = write_llama(tmp_path / "model.gguf", tweak=divide)
    assert settings_of(GgufFile(file), "llama")["rope_parameters"]["rope_type"] == "llama3"
    assert opened(file, tmp_path / "scratch")
    file = write_llama(tmp_path / "model.gguf", tweak=divide_and_scale)
    assert "no place in llama: rope_freqs.weight" in refused(file, tmp_path / "scratch2")
    file = write_llama(tmp_path / "model.gguf", tweak=lambda writer: divide(writer, 7))
    assert "rope_freqs.weight has the shape [7] for [8]" in refused(file, tmp_path / "scratch3")


@pytest.mark.parametrize("divided", [True, False])
def test_a_huge_head_is_refused_before_anything_is_allocated(divided: bool, tmp_path: Path) -> None:
    def enlarge(writer: GGUFWriter) -> None:
        if divided:
            writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
        writer.add_key_length(2**31 - 2)

    file = write_llama(tmp_path / "model.gguf", tweak=enlarge)
    raw = bytearray(file.read_bytes())
    key = b"llama.rope.dimension_count"
    struct.pack_into("<I", raw, raw.index(key) + len(key) + 4, 2**31 - 2)
    file.write_bytes(raw)
    with limited_memory(1 << 30):
        problem = refused(file, tmp_path / "scratch")
    assert "has no blk.0.attn_q.weight of 4 heads of 2147483646 values" in problem


def test_a_list_of_numbers_takes_no_more_memory_than_the_file(tmp_path: Path) -> None:
    file, count = write_llama(tmp_path / "model.gguf", tweak=lambda writer: writer.add_array("flags", [True])), 64 << 20
    raw = file.read_bytes()
    place = raw.index(b"flags") + len("flags") + 8
    file.write_bytes(
        raw[:place] + struct.pack("<Q", count + 1) + raw[place + 8 : place + 9] + bytes(count) + raw[place + 9 :]
    )
    with limited_memory(3 * count):
        assert len(GgufFile(file).metadata["flags"]) == count + 1


@pytest.mark.parametrize("key", ["general.architecture", "llama.expert_count", "llama.rope.scaling.factor"])
def test_lists_in_the_place_of_a_value_are_read_or_refused(key: str, tmp_path: Path) -> None:
    file = write_llama(tmp_path / "model.gguf", tweak=lambda writer: writer.add_array("x" * len(key), [1.0, 2.0]))
    raw = file.read_bytes().replace(key.encode(), b"y" * len(key)).replace(b"x" * len(key), key.encode())
    file.write_bytes(raw)
    if key == "llama.expert_count":
        assert opened(file, tmp_path / "scratch")
    else:
        assert refused(file, tmp_path / "scratch")


def test_unknown_architectures_and_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    file = write_llama(tmp_path / "model.gguf", pre="nobodys")
    assert "tokenizer.ggml.pre=nobodys" in refused(file, tmp_path / "scratch")
    file.write_bytes(write_llama(tmp_path / "model.gguf").read_bytes().replace(b"\0llama", b"\0mamba", 1))
    assert "general.architecture" in refused(file, tmp_path / "scratch2")


def test_options_that_a_gguf_file_answers_itself_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_llama(tmp_path / "model.gguf")
    for words in (["--prefix", "model."], ["model=llama_tiny"]):
        assert main(["import", "--from", str(file), "--out", str(tmp_path / "out"), *words]) == 2
        assert "names its model" in capsys.readouterr().err
