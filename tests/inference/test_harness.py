"""lm-eval's tasks on a run. The oracle is the harness's own ``hf`` model on the run's export."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.cli.main import main
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.harness import harness_settings
from mgpu_pipe.inference.harness.harness_settings import HarnessSettings
from tests.inference.support import WORDS, write_run, write_texts
from tests.support.command import mgpu
from tests.support.sampling import one_in

TASKS = ("words_choice", "words_next", "words_text")
STRATEGIES = {"ddp": ("strategy=ddp",), "tp": ("strategy=tp",), "fsdp": ("strategy=fsdp",), "pp": ("strategy=pp",)}

CHOICE = """
task: words_choice
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "the {{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
NEXT = """
task: words_next
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["lazy"], max_gen_toks: 6, do_sample: false}
metric_list:
  - {metric: bypass, aggregation: bypass, higher_is_better: true}
"""
TEXT = """
task: words_text
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lm_eval", reason="pip install 'mgpu_pipe[harness]'")
    folder = tmp_path_factory.mktemp("harness")
    write_run(folder / "run", "llama", write_texts(folder / "texts", 12), folder / "cache")
    (folder / "tasks").mkdir()
    rows = [
        {
            "question": " ".join(WORDS[(at * 5 + k) % len(WORDS)] for k in range(1 + at % 5)),
            "choices": [f" {WORDS[(at + k) % len(WORDS)]} {WORDS[at % 7]}"[: 6 + 3 * k] for k in range(2 + at % 3)],
            "answer": at % 2,
        }
        for at in range(11)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for text in (CHOICE, NEXT, TEXT):
        name = text.split()[1]
        (folder / "tasks" / f"{name}.yaml").write_text(text % (folder / "rows.jsonl"))
    return folder


@pytest.fixture(scope="module")
def expected(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of the harness's own model on the export."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        assert main(["export", str(place / "run"), "--out", str(place / "exported")]) == 0
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        results: dict[str, Any] = simple_evaluate(
            model="hf",
            model_args={"pretrained": str(place / "exported"), "dtype": "float32"},
            tasks=list(TASKS),
            task_manager=TaskManager(include_path=str(place / "tasks"), include_defaults=False),
            device="cpu",
            batch_size=8,
            bootstrap_iters=0,
        )
    return results


def responses(results: dict[str, Any], task: str) -> list[Any]:
    """The model's answers to a task, in the order of its samples."""
    samples = sorted(results["samples"][task], key=lambda sample: int(sample["doc_id"]))
    return json.loads(json.dumps([sample["filtered_resps"] for sample in samples], default=str))


def assert_same(results: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert responses(results, "words_next") == responses(expected, "words_next")
    assert any(text[0] for text in responses(expected, "words_next")), "something is generated"
    for mine, theirs in zip(responses(results, "words_choice"), responses(expected, "words_choice"), strict=True):
        for (value, is_greedy), (true_value, truth) in zip(mine, theirs, strict=True):
            assert float(value) == pytest.approx(float(true_value), rel=tolerance, abs=tolerance)
            assert str(is_greedy) == str(truth)
        by_value = [[float(value) for value, _ in row] for row in (mine, theirs)]
        assert by_value[0].index(max(by_value[0])) == by_value[1].index(max(by_value[1]))
    for mine, theirs in zip(responses(results, "words_text"), responses(expected, "words_text"), strict=True):
        assert float(mine[0]) == pytest.approx(float(theirs[0]), rel=tolerance)
    assert results["results"]["words_choice"]["acc,none"] == expected["results"]["words_choice"]["acc,none"]


def words_of(place: Path, out: Path) -> list[str]:
    tasks = ["--harness", ",".join(TASKS), "--harness-path", str(place / "tasks")]
    return ["eval", str(place / "run"), *tasks, "--harness-output", str(out)]


@pytest.mark.slow
def test_one_process_gives_the_harness_own_figures(
    place: Path, expected: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words_of(place, tmp_path / "out.json"), "--device", "cpu"]) == 0
    assert_same(json.loads((tmp_path / "out.json").read_text()), expected, 0.0)
    said, warnings = capsys.readouterr()
    assert "pretrained" not in warnings, "lm-eval warns of a model that has no name"
    figure = expected["results"]["words_choice"]["acc,none"]
    assert any(line.split() == ["words_choice", "acc", f"{figure:.4f}", "of", "11"] for line in said.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", one_in(2, STRATEGIES))
def test_every_strategy_gives_them(
    place: Path, expected: dict[str, Any], strategy: str, tmp_path: Path, cache: Path
) -> None:
    processes = ("trainer.devices=2", "trainer.accelerator=cpu")
    mgpu(cache, place, *words_of(place, tmp_path / "out.json"), *STRATEGIES[strategy], *processes)
    assert_same(json.loads((tmp_path / "out.json").read_text()), expected, 1e-5)


def test_a_task_file_that_names_code_is_refused(place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, text in (
        ("direct", "task: x\nprocess_docs: !function evil.run\n"),
        ("nested", "task: x\nmetric_list:\n  - metric: acc\n  - metric: !function evil.run\n"),
        ("included", "task: x\ninclude: ../elsewhere.yaml\n"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (tmp_path / "elsewhere.yaml").write_text("doc_to_text: !function evil.run\n")
        (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
        (folder / "x.yaml").write_text(text)
        assert main(["eval", str(place / "run"), "--harness", "x", "--harness-path", str(folder)]) == 2
        told = capfd.readouterr().err
        assert "names code (!function evil.run)" in told and "--harness-code" in told and told.count("\n") == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_the_harness_own_tasks_are_known_beside_those_of_a_folder(place: Path) -> None:
    from mgpu_pipe.inference.harness.model import measure_tasks

    asked = HarnessSettings(Path("run"), ["words_text", "arc_easy", "nowhere"], [str(place / "tasks")])
    with pytest.raises(BadInputError, match=r"^--harness=nowhere: no such task; "):
        measure_tasks(asked, None)


def test_no_library_is_imported_before_it_is_kept_offline() -> None:
    """The Hub's libraries read their variables once; without lm-eval the command names the package to install."""
    program = (
        "import sys, mgpu_pipe.launch.harness_job\n"
        "from mgpu_pipe.cli.main import main\n"
        "code = main(['eval', 'missing', '--harness', 'x'])\n"
        "print(code, sorted({'lm_eval', 'datasets', 'huggingface_hub', 'torch'} & {*sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "2 []\n", done.stderr


def test_a_template_cannot_run_code() -> None:
    """Without the sandbox this template gives the interpreter's subclasses, from which anything can be run."""
    pytest.importorskip("lm_eval", reason="pip install 'mgpu_pipe[harness]'")
    from jinja2.exceptions import SecurityError
    from lm_eval import utils

    from mgpu_pipe.inference.harness.model import _sandbox

    template = "{{ ''.__class__.__mro__[1].__subclasses__() | length }}"
    assert utils.env.sandboxed or int(utils.env.from_string(template).render()) > 100
    sandbox = _sandbox(utils.env)
    with pytest.raises(SecurityError):
        sandbox.from_string(template).render()
    assert sandbox.from_string("{{ 'aba' | regex_replace('b', 'c') }}").render() == "aca"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--harness-path", "tasks"], "--harness-path: only works with --harness TASKS"),
        (["--harness", "x", "--harness-path", "nowhere"], "--harness-path=nowhere: no such folder"),
        (["--harness", "x", "optimizer.lr=1"], "optimizer.lr=1: eval --harness takes strategy, trainer.devices"),
        (["--harness", "x", "--weights", "ema", "strategy=tp", "trainer.devices=2"], "--weights=ema: strategy=tp"),
    ],
)
def test_wrong_evaluations_are_one_line(
    place: Path, words: list[str], said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    assert main(["eval", "run", *words]) == 2
    told = capfd.readouterr().err
    assert said in told.replace(f"{place}/", "") and told.count("\n") == 1


def test_a_missing_harness_is_one_line_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness_settings, "find_spec", lambda name: None)
    with pytest.raises(
        BadInputError, match=r"needs the package lm-eval; install it: pip install 'mgpu_pipe\[harness\]'"
    ):
        harness_settings.require_harness()
