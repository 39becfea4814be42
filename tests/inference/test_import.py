"""``mgpu-pipe import`` of real foreign checkpoints. Oracle: the model whose weights were saved, and its logits."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from mgpu_pipe.cli.main import main
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.errors import ModelFolderError
from mgpu_pipe.inference.import_weights import read_weights
from mgpu_pipe.inference.open import load_run
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.weights.folder import check_model_folder
from mgpu_pipe.training.deepspeed.zero_build import prepare_deepspeed
from tests.inference.support import write_tokenizer
from tests.models.old_folders import write_old
from tests.support.processes import run_processes
from tests.support.sampling import one_in

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 304,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODEL = ["model=llama_tiny", *(f"model.config.{key}={value}" for key, value in SIZES.items())]


def model() -> PreTrainedModel:
    return materialise(build_meta(compose(MODEL)[0].model), 5, "cpu").eval()


def lightning_file(path: Path, prefix: str = "net.", **more: torch.Tensor) -> Path:
    """What a LightningModule that holds the model under ``prefix`` saves."""
    state = {prefix + name: tensor for name, tensor in model().state_dict().items()}
    torch.save(
        {
            "state_dict": {**state, **more},
            "epoch": 1,
            "pytorch-lightning_version": "2.6.6",
            "optimizer_states": [{"state": {}}],
            "hyper_parameters": {"lr": 0.1},
        },
        path,
    )
    return path


def imported(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main(["import", *map(str, words)]) == code
    done = capsys.readouterr()
    assert done.err.count("\n") == (1 if code else 0), done.err
    return done.out + done.err


def same_logits(out: Path) -> None:
    ids = torch.arange(20)[None]
    torch.testing.assert_close(load_run(out).model(ids).logits, model()(ids).logits, atol=1e-6, rtol=1e-6)


def test_a_lightning_file_becomes_a_folder_that_runs_start_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = lightning_file(tmp_path / "last.ckpt", **{"accuracy.total": torch.zeros(3)}), tmp_path / "out"
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    said = imported(
        capsys,
        "--from",
        source,
        "--out",
        out,
        "--prefix",
        "net.",
        "--ignore",
        "accuracy.*",
        "--tokenizer",
        tokenizer,
        *MODEL,
    )
    assert f"model.path={out}" in said
    same_logits(out)
    assert AutoModelForCausalLM.from_pretrained(out, local_files_only=True).config.eos_token_id == 0
    assert main(["check", "model=hf", f"model.path={out}", "data.seq_len=32", "trainer.max_steps=1"]) == 0


def test_a_file_of_nanogpt_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights stand beside its settings, under a compiled model's names; linear layers have theirs transposed."""
    sizes = {"vocab_size": 304, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    words = ["model=gpt2_tiny", *(f"model.config.{key}={value}" for key, value in sizes.items())]
    wanted = materialise(build_meta(compose(words)[0].model), 5, "cpu").eval()
    ends = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    weights = {name: tensor.T if name.endswith(ends) else tensor for name, tensor in wanted.state_dict().items()}
    state = {f"_orig_mod.{name}": tensor.contiguous() for name, tensor in weights.items()}
    torch.save({"model": state, "optimizer": {"state": {}}, "model_args": sizes, "iter_num": 3}, tmp_path / "ckpt.pt")
    asked = ["--from", tmp_path / "ckpt.pt", "--out", tmp_path / "out", *words]
    assert "use --prefix _orig_mod." in imported(capsys, *asked, code=2)
    imported(capsys, *asked, "--prefix", "_orig_mod.")
    ids = torch.arange(20)[None]
    torch.testing.assert_close(load_run(tmp_path / "out").model(ids).logits, wanted(ids).logits, atol=1e-6, rtol=1e-6)


def test_a_file_of_torch_before_1_6_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "old.pt"
    torch.save(model().state_dict(), file, _use_new_zipfile_serialization=False)
    imported(capsys, "--from", file, "--out", tmp_path / "out", *MODEL)
    same_logits(tmp_path / "out")


def test_what_does_not_fit_is_listed_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = lightning_file(tmp_path / "last.ckpt", **{"accuracy.total": torch.zeros(3)}), tmp_path / "out"
    said = imported(capsys, "--from", source, "--out", out, *MODEL, code=2)
    assert "missing: " in said and "unexpected: accuracy.total, net.lm_head.weight" in said
    assert "use --prefix net." in said
    said = imported(
        capsys, "--from", source, "--out", out, "--prefix", "net.", *MODEL, "model.config.intermediate_size=128", code=2
    )
    assert "1 unexpected: accuracy.total" in said and "6 of another shape" in said
    assert "model.layers.0.mlp.down_proj.weight [64, 96] for [64, 128]" in said
    tied = [*MODEL, "model.config.tie_word_embeddings=true"]
    said = imported(capsys, "--from", source, "--out", out, "--prefix", "net.", "--ignore", "acc*", *tied, code=2)
    assert "ties lm_head.weight to model.embed_tokens.weight, and the tensors hold other values" in said
    assert not out.exists()


class Payload:
    """Pickles as a call."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.marker),)


def test_a_file_that_brings_code_is_refused_also_with_trust(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, marker = tmp_path / "last.ckpt", tmp_path / "ran"
    torch.save({"state_dict": model().state_dict(), "callbacks": Payload(marker)}, source)
    for trust in ([], ["--trust"]):
        said = imported(capsys, "--from", source, "--out", tmp_path / "out", *trust, *MODEL, code=2)
        assert "it names posix.mkdir" in said and "could run code" in said
    assert not marker.exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: path.write_bytes(b"no checkpoint"), "last.ckpt: "),
        (lambda path: path.write_bytes(b"\x80\x02."), "cannot be read as a torch checkpoint"),
        (lambda path: torch.save({"state_dict": {"a": 3}}, path), "'a' of its state_dict is not a plain tensor"),
        (lambda path: torch.save([1], path), "holds no state_dict"),
        (lambda path: path.mkdir(), "neither a Lightning or torch file nor a DeepSpeed folder"),
        (lambda path: (path.mkdir(), (path / "model.safetensors").touch()), "use model=hf model.path="),
        (lambda path: (path.mkdir(), (path / "config.json").touch()), "nor a DeepSpeed folder"),
        (lambda path: (path.mkdir(), (path / "b.pth").touch()), "name a file of it: b.pth"),
        (lambda path: (path.mkdir(), (path / ".metadata").touch()), "format_utils dcp_to_torch "),
        (lambda path: ((path / "0").mkdir(parents=True), (path / "0" / ".metadata").touch()), "dcp_to_torch "),
        (
            lambda path: torch.save({"model": {"layers.0.attn.qkv.weight": torch.ones(1)}}, path),
            "these are LitGPT's names",
        ),
        (lambda path: (path.mkdir(), (path / "manifest.json").touch()), "use checkpoint.init_from="),
        (lambda path: None, "no such file or folder; check the path"),
        (lambda path: (path.mkdir(), (path / "latest").write_text("x")), "repeat with --trust"),
    ],
)
def test_what_cannot_be_imported_says_why(
    make, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    source = tmp_path / "last.ckpt"
    make(source)
    assert expected in imported(capsys, "--from", source, "--out", tmp_path / "out", *MODEL, code=2)


def test_the_model_must_be_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "a.ckpt", tmp_path / "out"
    assert "no such file" in imported(capsys, "--from", source, "--out", out, code=2)
    source.touch()
    assert "model=llama_tiny" in imported(capsys, "--from", source, "--out", out, code=2)
    assert "model overrides only" in imported(capsys, "--from", source, "--out", out, "optimizer.lr=1", code=2)


def _save_zero(folder: str, stage: int) -> None:
    """Each of the processes trains nothing, and saves by DeepSpeed's own engine."""
    prepare_deepspeed(torch.device("cpu"))  # without it DeepSpeed would compile an extension
    import deepspeed

    held = torch.nn.ModuleDict({"model": model()})
    engine, *_ = deepspeed.initialize(
        model=held,
        optimizer=torch.optim.AdamW(held.parameters(), lr=1e-3),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    engine.save_checkpoint(folder, tag="global_step0")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_a_deepspeed_folder_is_converted_only_on_trust(
    stage: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "zero"
    run_processes(2, _save_zero, str(source), stage)
    for named in (source, source / "global_step0"):
        said = imported(capsys, "--from", named, "--out", tmp_path / "out", *MODEL, code=2)
        assert "runs whatever code" in said and "--trust" in said
    named, out = source / "global_step0", tmp_path / "out"
    imported(capsys, "--from", named, "--out", out, "--prefix", "model.", "--trust", *MODEL)
    same_logits(tmp_path / "out")


def test_the_converter_is_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a trusted pickle does, it does elsewhere: a stand-in for the converter writes its own process id."""
    package = tmp_path / "site" / "deepspeed" / "utils"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "zero_to_fp32.py").write_text(
        "import os, sys, torch\ntorch.save({'pid': torch.tensor(os.getpid())}, sys.argv[2] + '/pytorch_model.bin')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{package.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(package.parents[1]))
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    source, scratch = tmp_path / "zero", tmp_path / "scratch"
    for folder in (source, scratch):
        folder.mkdir()
    (source / "latest").write_text("global_step0")
    found = read_weights(source, True, scratch)
    assert int(found["pid"]) != os.getpid()


@pytest.mark.parametrize("shards", one_in(2, [3, 1]))
def test_a_folder_from_before_safetensors_is_converted(
    shards: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its masks and frequencies are left out, as transformers leaves them out."""
    folder, out = write_old("pythia", tmp_path), tmp_path / "out"
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {name: f"pytorch_model-{i % shards + 1:05d}-of-{shards:05d}.bin" for i, name in enumerate(names)}
    for file in set(files.values()):
        torch.save({name: tensors[name] for name in names if files[name] == file}, folder / file)
    if shards == 1:
        (folder / files[names[0]]).rename(folder / "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    expected = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    (folder / "model.safetensors").unlink()
    write_tokenizer(folder)
    with pytest.raises(ModelFolderError, match="mgpu-pipe import --from="):
        check_model_folder(folder)
    imported(capsys, "--from", folder, "--out", out, "model=hf", f"model.path={folder}")
    found = AutoModelForCausalLM.from_pretrained(out, local_files_only=True, dtype=torch.float32)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
