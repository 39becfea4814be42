"""eval, generate and export on real folders. The oracles are transformers' own from_pretrained and plain loops."""

from __future__ import annotations

import io
import math
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mgpu_pipe.cli.main import main
from mgpu_pipe.config.freeze import load as load_frozen
from mgpu_pipe.data.text.prepare_text import prepare
from mgpu_pipe.errors import printable
from mgpu_pipe.inference.generation import generate_text, load_tokenizer
from mgpu_pipe.inference.open import load_run
from mgpu_pipe.models import fields
from tests.inference.support import write_run, write_texts

FAMILIES = ["llama", "mixtral"]
Run = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    base = tmp_path_factory.mktemp("runs")
    texts = write_texts(base / "texts", 12)
    made = {}
    for family in FAMILIES:
        root = base / "outputs" / family / "20250101_000000-abcdef01"
        made[family] = (root, write_run(root, family, texts, base / "cache"))
        os.utime(root / "checkpoints" / "step-00000003" / "manifest.json", (len(made), len(made)))
    return made


@pytest.fixture
def run(runs: dict[str, Run]) -> Run:
    return runs["llama"]


def test_a_run_a_step_and_a_model_folder_open(runs: dict[str, Run]) -> None:
    ids = torch.arange(3, 25)[None]
    for family, (root, saved) in runs.items():
        for path in (root, root / "checkpoints" / "step-00000003"):
            loaded = load_run(path)
            assert loaded.config is not None
            assert (loaded.step, loaded.config.seed) == (3, 11), family
            assert torch.equal(loaded.model(input_ids=ids).logits, saved(input_ids=ids).logits)
            assert loaded.tokenizer().eos_token == "<|endoftext|>"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_gives_the_same_logits_and_greedy_text(
    runs: dict[str, Run], family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, saved = runs[family]
    out = tmp_path / "exported"
    assert main(["export", str(root), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert str(out) in printed
    assert "from_pretrained" in printed
    model = AutoModelForCausalLM.from_pretrained(out, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    ids = tokenizer("the quick brown fox", return_tensors="pt")["input_ids"]
    torch.testing.assert_close(model(ids).logits, saved(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
    greedy = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)[0]
    expected = tokenizer.decode(greedy, skip_special_tokens=True)
    prompts = ["--prompt", "the quick brown fox", "--temperature", "0", "--max-new-tokens", "12"]
    for source in (root, out):
        assert main(["generate", str(source), *prompts]) == 0
        assert capsys.readouterr().out == printable(expected) + "\n"
    assert not list(tmp_path.glob("exported.*"))


@pytest.mark.slow
def test_export_replaces_only_when_told_and_only_model_folders(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "exported"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert main(["export", str(run[0]), "--out", str(out), "--force"]) == 2
    assert (out / "notes.txt").read_text() == "mine"
    shutil.rmtree(out)
    shutil.copytree(run[0] / "tokenizer", out)
    (out / "config.json").write_text("{}")
    assert main(["export", str(run[0]), "--out", str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["export", str(run[0]), "--out", str(out), "--dtype", "bf16", "--force"]) == 0
    model = AutoModelForCausalLM.from_pretrained(out, local_files_only=True, dtype="auto")
    assert model.dtype == torch.bfloat16
    torch.testing.assert_close(model.lm_head.weight.float(), run[1].lm_head.weight, rtol=1e-2, atol=1e-4)


def test_an_export_that_cannot_be_written_is_one_line(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["export", str(run[0]), "--out", str(tmp_path / "file" / "exported")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "cannot be written" in error


@pytest.mark.parametrize(
    ("verb", "arguments", "said"),
    [
        ("export", [], "required: --out"),
        ("generate", ["--top-p", "3"], "argument --top-p: 3: use a number above 0 and at most 1"),
        ("generate", ["--max-new-tokens", "x"], "argument --max-new-tokens: x: use a whole number of at least 1"),
        ("eval", ["--devise", "cpu"], "unrecognized arguments: --devise"),
    ],
)
def test_a_wrong_argument_is_one_line(
    verb: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def plain_loss(root: Path, model: PreTrainedModel) -> tuple[float, int]:
    """The oracle: every held-out sample's documents one by one, each alone in its row."""
    from mgpu_pipe.data.text.packed_dataset import PackedDataset

    config = load_frozen(root / "config.yaml")
    prepared = prepare(config)
    dataset = PackedDataset.open(prepared, "validation")
    total, tokens = 0.0, 0
    for sample in prepared.evaluated_samples():
        batch = dataset.batch(np.array([sample]))
        starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        for start, stop in zip(starts, [*starts[1:], config.data.seq_len], strict=True):
            logits = model(input_ids=batch["input_ids"][:, start:stop]).logits[0].double()
            labels = batch["labels"][0, start:stop]
            total += F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
            tokens += int((labels != -100).sum())
    return total / tokens, tokens


def test_eval_is_the_mean_over_valid_tokens(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    root, model = run
    with torch.no_grad():
        expected, tokens = plain_loss(root, model)
    assert main(["eval", str(root)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert float(lines["loss"].split()[0]) == pytest.approx(expected, rel=1e-5)
    assert float(lines["perplexity"]) == pytest.approx(math.exp(expected), rel=1e-3)
    assert lines["over"].startswith(f"{tokens} tokens")


def test_eval_takes_other_data_and_nothing_else(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held_out = write_texts(tmp_path / "held", 2)
    assert main(["eval", str(run[0]), f"data.validation_paths=[{held_out}/*.txt]"]) == 0
    over = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("over"))
    tokenizer = load_tokenizer(run[0] / "tokenizer")
    total = sum(len(tokenizer(file.read_text())["input_ids"]) for file in held_out.iterdir())
    assert 0.9 * total <= int(over.split()[1]) <= total
    assert main(["eval", str(run[0]), "data.validation_fraction=0"]) == 2
    assert "data.validation_paths" in capsys.readouterr().err
    assert main(["eval", str(run[0]), "optimizer.lr=1"]) == 2
    assert "data and eval overrides only" in capsys.readouterr().err
    assert main(["eval", str(run[0]), "data.validation_pathz=[x]"]) == 2
    assert "data.validation_paths" in capsys.readouterr().err


def test_the_newest_run_is_taken_by_default(
    runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = runs[FAMILIES[-1]][0]
    monkeypatch.chdir(newest.parents[2])
    assert main(["eval"]) == 0
    assert f"outputs/{FAMILIES[-1]}/" in capsys.readouterr().out


def test_prompts_come_from_standard_input(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the lazy dog\n"))
    assert main(["generate", str(run[0]), "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("the lazy dog")


def test_draws_are_seeded_and_leave_no_trace(run: Run) -> None:
    root, model = run
    tokenizer = load_tokenizer(root / "tokenizer")
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    model.train()
    both = generate_text(model, tokenizer, ["the", "fox"], max_new_tokens=8, seed=5)
    assert model.training
    assert torch.equal(torch.rand(2), expected)
    model.eval()
    assert generate_text(model, root / "tokenizer", ["the"], max_new_tokens=8, seed=5) == both[:1]
    assert generate_text(model, tokenizer, ["the"], max_new_tokens=8, seed=6) != both[:1]
    greedy = generate_text(model, tokenizer, ["the"], max_new_tokens=8, temperature=0.0)
    assert generate_text(model, tokenizer, ["the"], max_new_tokens=8, temperature=1e-308) == greedy
    assert generate_text(model, tokenizer, [""], max_new_tokens=4)[0]


def test_a_prompt_stays_inside_the_context(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    root, model = run
    long = "fox " * 62
    assert generate_text(model, root / "tokenizer", ["fox " * 20], max_new_tokens=500)
    assert main(["generate", str(root), "--prompt", long * 2]) == 2
    error = capsys.readouterr().err
    assert "context is 64" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("verb", ["eval", "generate"])
def test_folders_that_are_no_runs(verb, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    prompt = ["--prompt", "x"] if verb == "generate" else []
    monkeypatch.chdir(tmp_path)
    for arguments in ([str(tmp_path)], [str(tmp_path / "nowhere")], []):
        assert main([verb, *arguments, *prompt]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1


def test_an_interpreter_without_docstrings_opens_no_run(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "sys", SimpleNamespace(flags=SimpleNamespace(optimize=2)))
    for words in (["eval"], ["generate", "--prompt", "x"]):
        assert main([words[0], str(run[0]), *words[1:]]) == 2
        assert capsys.readouterr().err.startswith("error: PYTHONOPTIMIZE=2: transformers reads docstrings")


def test_recordings_are_checked_like_pictures(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(run[0]), "--prompt", "x", "--audio", "nowhere.wav"]
    for more, said in (([], "--audio=nowhere.wav: no such file"), (["--device-map", "auto"], "not work with --audio;")):
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err


def test_a_damaged_checkpoint_is_named(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(shutil.copytree(run[0], tmp_path / "run"))
    weights = next((root / "checkpoints").glob("step-*/model-*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert main(["generate", str(root), "--prompt", "x"]) == 2
    assert "checkpoint" in capsys.readouterr().err


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "run", "--out", "there"], "--out=there: exists already; choose another folder, or replace it with"),
        (["export", "run", "--out", "run"], "--out=run: exists and is not a model folder; choose another folder"),
        (["export", "nothing", "--out", "new"], "nothing: no such folder"),
        (["export", "run", "--out", "new", "--device", "cpu"], "unrecognized arguments: --device cpu"),
        (
            ["import", "--from", "nothing.ckpt", "--out", "new", "model=llama_tiny"],
            "--from=nothing.ckpt: no such file or folder",
        ),
        (["import", "--from", "file.ckpt", "--out", "there", "model=llama_tiny"], "--out=there: exists already"),
        (["generate", "run", "--prompt", "x", "--device", "cuda"], "--device=cuda: torch can use no GPU here"),
        (["generate", "run", "--prompt", "x", "--device", "tpu"], "--device=tpu: no such device; use auto, cpu, cuda"),
        (["generate", "nothing", "--prompt", "x"], "nothing: no such folder"),
        (["eval", "run", "--device", "cuda:3"], "--device=cuda:3: torch can use no GPU here; use auto or cpu"),
    ],
)
def test_it_is_one_line_and_nothing_slow_was_imported(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").write_text("{}")
    (tmp_path / "file.ckpt").write_text("x")
    program = textwrap.dedent(f"""
        import sys
        from mgpu_pipe.cli.main import main
        code = main({words!r})
        print(code, sorted({{"torch", "transformers", "pytorch_lightning"}} & set(sys.modules)))
    """)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.stdout == "2 []\n", done.stderr
    assert said in done.stderr and done.stderr.count("\n") == 1
