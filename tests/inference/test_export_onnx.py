"""``mgpu-pipe export --format onnx``. Oracle: transformers' model in torch, each row alone; the page's lines."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mgpu_pipe.cli.main import main
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, MgpuError
from mgpu_pipe.inference import export_onnx as export
from mgpu_pipe.inference.export_onnx import Case, OnnxReport, export_onnx
from mgpu_pipe.inference.onnx import FILE, PICTURE_FILE, TEXT_FILE, graphs
from mgpu_pipe.inference.open import StoredModel, read_from, with_buffers
from mgpu_pipe.models.build import build_meta, materialise
from tests.inference.support import write_run, write_texts
from tests.models.tiny import tiny_model
from tests.support.command import REPOSITORY
from tests.support.documented import blocks

runtime = pytest.importorskip("onnxruntime", reason="reads the exported files: pip install 'mgpu_pipe[onnx]'")
BERT = {"num_hidden_layers": 1}
CLASSES = {"masked": "AutoModelForMaskedLM", "classes": "AutoModelForSequenceClassification"}


def stored_model(settings: Any, folder: Path, model_class: str | None = None) -> StoredModel:
    """A model with weights far from its initialisation."""
    model = materialise(build_meta(settings, model_class), 1, "cpu").eval()
    for parameter in model.parameters():
        parameter.data.mul_(2)
    return StoredModel(with_buffers(build_meta(settings, model_class)), read_from(model), folder, None, None, None)


def preset(*overrides: str) -> Any:
    return compose(list(overrides))[0].model


def exported(stored: StoredModel, folder: Path, dtype: Any = "fp32") -> OnnxReport:
    report = export_onnx(stored, folder / "out", dtype)
    assert report.accuracies[1].error < (1e-5 if dtype == "fp32" else 1e-2)
    return report


def opened(folder: Path, file: str = FILE) -> Any:
    return runtime.InferenceSession(str(folder / "out" / file), providers=["CPUExecutionProvider"])


@pytest.mark.slow
def test_a_causal_run_becomes_a_file_that_the_pages_lines_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, out = tmp_path / "run", tmp_path / "served"
    model = write_run(root, "llama", write_texts(tmp_path / "texts", 12), tmp_path / "cache", num_hidden_layers=1)
    words = ["export", str(root), "--out", str(out), "--format", "onnx"]
    assert main(words) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {row[0]: row for row in rows if row[0] in ("run", "fp32")}
    assert main(["eval", str(root)]) == 0
    perplexity = next(line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("perplexity"))
    for name in ("run", "fp32"):
        assert float(table[name][2]) == pytest.approx(float(perplexity), rel=1e-5)
    assert float(table["fp32"][3]) < 1e-5 and float(table["fp32"][1]) < 1.3 * float(table["run"][1])

    [code] = [block.text for block in blocks(REPOSITORY / "docs/guides/onnx.md") if block.language == "python"]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "onnx.md", "exec"), names)
    for row, logits in zip(names["rows"], names["output"], strict=True):
        there = torch.tensor(row.attention_mask).bool()
        expected = model(torch.tensor(row.ids)[there][None], use_cache=False).logits[0].detach()
        torch.testing.assert_close(torch.from_numpy(logits)[there], expected, rtol=1e-4, atol=1e-4)
    assert b"site-packages" not in (out / FILE).read_bytes(), "places of this machine are in the file"

    for more, said in ((["--dtype", "bf16"], "use --dtype fp32"), (["--push", "a/b"], "--push"), ([], "--force")):
        assert main([*words, *more]) == 2 and said in capsys.readouterr().err


@pytest.mark.slow
def test_vectors_are_pooled_and_normalised_and_padding_changes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = description("text_embedding").keys(pooling="mean").folder_files(RunConfig().data, 64)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    stored = stored_model(tiny_model("bert", **BERT), tmp_path, "AutoModel")
    exported(replace(stored, maker=tmp_path), tmp_path)
    assert (tmp_path / "out" / "1_Pooling" / "config.json").is_file()
    inputs = {
        "input_ids": np.array([[5, 6, 7, 8], [9, 4, 0, 0]]),
        "attention_mask": np.array([[1, 1, 1, 1], [1, 1, 0, 0]]),
    }
    [vectors] = opened(tmp_path).run(["sentence_embedding"], inputs)
    assert vectors.shape == (2, 64)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)

    def forget_padding(self: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return of_masked(self, input_ids, attention_mask.clamp_min(1))

    of_masked = graphs.VectorModel.forward
    monkeypatch.setattr(graphs.VectorModel, "forward", forget_padding)
    with pytest.raises(MgpuError, match=r"model\.onnx differs by .*\[3, 32\]"):
        export_onnx(stored, tmp_path / "broken", "fp32")
    assert not (tmp_path / "broken").exists()


@pytest.mark.slow
def test_both_towers_give_the_logits_of_pictures_and_texts(tmp_path: Path) -> None:
    ends = [f"+model.config.text_config.{name}_token_id={number}" for name, number in (("eos", 383), ("bos", 382))]
    layers = [f"model.config.{tower}_config.num_hidden_layers=1" for tower in ("text", "vision")]
    settings = preset("model=clip_tiny", "objective=contrastive", "data=captioned_digits", *ends, *layers)
    stored = stored_model(settings, tmp_path, "AutoModelForZeroShotImageClassification")
    exported(stored, tmp_path)
    model = export._load(stored)
    pictures, ids = torch.randn(2, 1, 8, 8), torch.tensor([[382, 7, 8, 383], [382, 9, 383, 383], [382, 5, 5, 383]])
    session = opened(tmp_path, TEXT_FILE)
    [texts] = session.run(["text_embeds"], {"input_ids": ids.numpy()})
    [seen] = opened(tmp_path, PICTURE_FILE).run(["image_embeds"], {"pixel_values": pictures.numpy()})
    facts = session.get_modelmeta().custom_metadata_map
    logits = float(facts["logit_scale"]) * seen @ texts.T + float(facts["logit_bias"])
    with torch.no_grad():
        expected = model(input_ids=ids, pixel_values=pictures).logits_per_image
    np.testing.assert_allclose(logits, expected.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_large_weights_lie_next_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 0)
    settings = preset(
        "model=vit_tiny", "objective=image_classification", "data=digits", "model.config.num_hidden_layers=1"
    )
    report = exported(stored_model(settings, tmp_path, "AutoModelForImageClassification"), tmp_path, "fp16")
    files = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert files[f"{FILE}.data"] > files[FILE]
    of_run, of_file = report.accuracies
    assert of_file.nbytes == files[FILE] + files[f"{FILE}.data"] < 0.7 * of_run.nbytes


@pytest.mark.slow
def test_sound_is_heard_alike_whatever_it_is_padded_to(tmp_path: Path) -> None:
    settings = preset("model=wav2vec2_tiny", "objective=ctc", "data=spoken_digits", "model.config.num_hidden_layers=1")
    exported(stored_model(settings, tmp_path, "AutoModelForCTC"), tmp_path)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "") for family in ("gpt2", "qwen3", "mistral", "phi3", "gemma3_text", "opt", "gpt_neox", "bloom")),
        *(("bert", kind) for kind in CLASSES),
        *(("roberta", kind) for kind in CLASSES),
        ("distilbert", "masked"),
        ("llama", "classes"),
    ],
)
def test_every_family(family: str, kind: str, dtype: str, tmp_path: Path) -> None:
    stored = stored_model(
        tiny_model(family, **({"num_labels": 3} if kind == "classes" else {})), tmp_path, CLASSES.get(kind)
    )
    exported(stored, tmp_path, dtype)


def test_half_precision_keeps_the_frequencies_of_rotations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded ones turn distant positions to wrong angles."""
    modules: list[nn.Module] = []

    def stop(module: nn.Module, *rest: object) -> None:
        modules.append(module)
        raise OSError("stop")

    monkeypatch.setattr(export, "_trace", stop)
    with pytest.raises(MgpuError, match="stop"):
        export_onnx(stored_model(tiny_model("llama", num_hidden_layers=1), tmp_path), tmp_path / "out", "fp16")
    assert {parameter.dtype for parameter in modules[0].parameters()} == {torch.float16}
    assert {buffer.dtype for buffer in modules[0].buffers()} == {torch.float32}


def write_zeros(graph: Any, case: Case, dtype: torch.dtype, folder: Path) -> None:
    """A file that computes nothing, written by the onnx package alone."""
    from onnx import TensorProto, helper, save

    rows, places = (helper.make_tensor_value_info(name, TensorProto.INT64, axes) for name, axes in graph.axes.items())
    zeros = helper.make_tensor("zeros", TensorProto.FLOAT, case.expected.shape, [0.0] * case.expected.numel())
    node = helper.make_node("Constant", [], [graph.output], value=zeros)
    value = helper.make_tensor_value_info(graph.output, TensorProto.FLOAT, case.expected.shape)
    save(
        helper.make_model(helper.make_graph([node], "zeros", [rows, places], [value]), ir_version=10),
        folder / graph.file,
    )


def test_a_file_that_gives_other_values_never_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "write_graph", write_zeros)
    stored = stored_model(tiny_model("llama", num_hidden_layers=1), tmp_path)
    with pytest.raises(MgpuError, match=r"failed their check and were removed: model\.onnx differs by inf"):
        export_onnx(stored, tmp_path / "out", "fp32")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("family", "model_class", "said"),
    [
        ("mixtral", None, "mixtral sends tokens to 4 experts"),
        ("t5", "AutoModelForSeq2SeqLM", "T5ForConditionalGeneration would need a file for each part"),
        ("bert", "AutoModel", "has no modules.json"),
    ],
)
def test_what_has_no_file_is_refused_by_name(family: str, model_class: str | None, said: str, tmp_path: Path) -> None:
    model: nn.Module = build_meta(tiny_model(family), model_class)
    stored = StoredModel(model, lambda *_: pytest.fail("read"), tmp_path, None, None, None)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match=said):
        export_onnx(stored, tmp_path / "out", "fp32")
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_named_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "onnxscript" else find(name, *rest)
    )
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "out"), "--format", "onnx"]) == 2
    assert "needs onnxscript; pip install 'mgpu_pipe[onnx]'" in capsys.readouterr().err
