"""The command line as users meet it: real processes, their output, exit codes and what they leave behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from mgpu_pipe import __version__
from mgpu_pipe.cli import main as cli
from mgpu_pipe.cli.verbs import verb_names
from mgpu_pipe.config.convert import all_keys
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.suggest import MEANT, VALUES
from mgpu_pipe.errors import EXIT_STOPPED, DataError
from mgpu_pipe.launch import signals as stop
from mgpu_pipe.runs.resume_command import CommandLine
from mgpu_pipe.sweep.store import Store, stores
from tests.support.no_launch import Result, launches_by
from tests.support.sampling import one_in

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Done:
    code: int
    out: str
    err: str


def mgpu_pipe(*arguments: str, folder: Path, path: Path = ROOT, **environment: str) -> Done:
    """Run the program in ``folder``."""
    variables = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-m", "mgpu_pipe", *arguments],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_check_says_what_will_run_and_leaves_nothing(tmp_path: Path) -> None:
    done = mgpu_pipe("check", "experiment=quickstart", "trainer.accelerator=cpu", folder=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "llama_small (llama), 5.2M parameters" in done.out
    assert "ddp, 2 CPU processes: dp_replicate=2" in done.out
    assert "16 samples = 2 x 1 micro-batches x 8; 4,096 tokens a step" in done.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["experiment=quickstart"], 0),
        (["model=mixtral_tiny", "strategy=ddp"], 0),
        (["callbacks=early_stopping", "trainer.val_every_n_steps=5"], 0),
        (["model=gpt2_tiny", "model.config.n_inner=0"], 2),
        (["peft=lora", "peft.r=4096000000"], 2),
        (["peft=lora", "peft.alpha=-1"], 2),
    ],
)
def test_check_imports_what_it_needs_alone(tmp_path: Path, overrides: list[str], code: int) -> None:
    """No library that computes or draws, no scan of installed packages, none of the rooms that a run is made of."""
    left_out = {"torch", "transformers", "pytorch_lightning", "pyarrow", "tokenizers", "numpy", "rich"}
    left_out |= {"importlib.metadata", "mgpu_pipe.report.run_view"}
    left_out |= {
        f"mgpu_pipe.{room}" for room in ("checkpoint", "inference", "objectives.base", "runs", "training.train")
    }
    program = textwrap.dedent(f"""
        import sys
        from mgpu_pipe.cli.main import main
        assert main(["check", *{overrides!r}]) == {code}
        print(sorted({left_out!r} & set(sys.modules)))
    """)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_bad_input_is_one_line_each_exit_2_and_nothing_is_left(tmp_path: Path) -> None:
    done = mgpu_pipe(
        "trainer.devcies=4",
        "+trainer.max_stepps=3",
        "strategy=ddpp",
        "data.seq_len=long",
        "optimizer._target_=os.system",
        folder=tmp_path,
    )
    assert (done.code, done.out) == (2, "")
    lines = done.err.splitlines()
    assert [line.split("=")[0] for line in lines] == [
        "error: trainer.devcies",
        "error: trainer.max_stepps",
        "error: strategy",
        "error: data.seq_len",
        "error: optimizer._target_",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chekc"], "no such verb; did you mean check?"),
        (["."], ".: is a path; give it to a key, e.g. model=hf model.path=."),
        (["check", str(ROOT / "docs")], "is a path; give it to a key"),
        (["check", "model=" + str(ROOT / "docs")], f"no such option; use model=hf model.path={ROOT / 'docs'}"),
        (["check", "data=mine/a.jsonl"], "use data=jsonl 'data.paths=[\"mine/a.jsonl\"]'"),
        (["mine.yaml"], "lies in ./conf/experiment, and the word is experiment=mine"),
        (["train", "conf/data/mine.yaml"], "chosen by its name: the word is data=mine"),
        (["check", "experiment=conf/experiment/mine.yaml"], "use experiment=mine, with the file as ./conf/experiment/"),
        (["resume", "outputs/run"], "no such verb; add checkpoint.resume=auto"),
        (["check", "model", "=", "llama_tiny"], "an override has no spaces and no colon; write model=llama_tiny"),
        (["check", "trainer.max_steps=2,"], "and no commas; write trainer.max_steps=2"),
        (["check", "lora.alpha=8"], "lora.alpha=8: no such key; did you mean peft.alpha?"),
        (["check", "optimizer.name=adamw"], "choose it by optimizer=<option>"),
        (["generate", "--max_new_tokens", "3"], "--max_new_tokens; did you mean --max-new-tokens? see"),
        (["eval", "--data.paths=x"], "keys are set by key=value, without dashes: data.paths=...; see"),
        (["check", "--bogus"], "unrecognized arguments: --bogus"),
        (["check", "--config-name", "nothing"], "Cannot find primary config 'nothing'"),
        (["check", "--config-dir", "nothing"], "--config-dir nothing: no such folder"),
        (["--cfg", "job", "strategy=ddpp"], "did you mean ddp?"),
        (["-m", "strategy=ddp,ddpp"], "strategy=ddpp: no such option; did you mean ddp?"),
        (["ls", "modle"], "no such group; did you mean model?"),
        (["schema", "x"], "mgpu-pipe schema: unrecognized arguments: x"),
        (["ls", "model", "data"], "mgpu-pipe ls: unrecognized arguments: data"),
        (["-sc", "query=bash"], "set completion up by mgpu-pipe -sc install=bash"),
        (["check", "--resolve"], "--resolve: only works with --cfg job"),
        (["--learning-rate", "3e-4"], "keys are set by key=value, without dashes; did you mean optimizer.lr?"),
        (["check", "--optimizer.lr=1"], "keys are set by key=value, without dashes; optimizer.lr=..."),
    ],
)
def test_wrong_words_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.slow
def test_hydras_own_flags_work(tmp_path: Path) -> None:
    shown = mgpu_pipe("--cfg", "job", "strategy=ddp", "trainer.devices=3", folder=tmp_path)
    assert shown.code == 0
    assert "dp_replicate: auto" in shown.out
    assert "devices: 3" in shown.out
    assert "== Flags ==" in mgpu_pipe("--hydra-help", folder=tmp_path).out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_programs_help_is_short_and_names_every_verb(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    assert shown.err == "" and shown.out.startswith("usage: mgpu-pipe [VERB] [OVERRIDES]\n")
    assert len(shown.out.splitlines()) <= 34 and max(map(len, shown.out.splitlines())) <= 80
    listed = [line.split()[0] for line in shown.out.split("verbs:\n")[1].split("\n\n")[0].splitlines()]
    assert listed == verb_names()


@pytest.mark.parametrize("verb", verb_names())
def test_each_verbs_help_is_short_and_its_own(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    try:
        assert cli.main([verb, "--help"]) == 0
    except SystemExit as ended:
        assert ended.code == 0
    shown = capsys.readouterr()
    assert shown.err == "" and len(shown.out.splitlines()) <= 46
    assert shown.out.startswith(f"usage: mgpu-pipe {'[train]' if verb == 'train' else verb} ")
    assert "--help" in shown.out
    with suppress(SystemExit):
        cli.main(["help", verb])
    assert capsys.readouterr().out == shown.out


@pytest.mark.parametrize("words", [["--version"], ["version"], ["check", "strategy=ddp", "--version"]])
def test_the_version_is_this_programs(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"mgpu_pipe {__version__}\n"


KEYS = set(all_keys())


def test_other_programs_names_for_a_key_lead_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    free, lines = ("optimizer.options.", "model.config.", "callbacks."), dict[str, str]()
    for meant, words in MEANT:
        named = re.findall(r"\b(?:[a-z_]+\.)+[a-z_0-9]+(?==|\b)", meant) if " " in meant else [meant]
        assert all(key in KEYS or key.startswith(free) for key in named), meant
        word, *others = words.split()
        assert not KEYS & {word, *others}
        lines |= dict.fromkeys((word, f"trainer.{word}", word.replace("_", "-")), meant)
    assert cli.main(["check", *(f"{key}=1" for key in lines)]) == 2
    said = capsys.readouterr().err.splitlines()
    for key, meant in lines.items():
        assert any(line.startswith(f"error: {key}=1: no such key; ") and meant in line for line in said), key


@pytest.mark.parametrize(
    ("word", "fix"),
    one_in(
        3,
        [
            *((f"{key}={value}", f"use {here}") for key, values in VALUES.items() for value, here in values.items()),
            ("model=some/name", "use model=hf model.path=some/name"),
            ("trainer.precision=bf16", "choose it by precision=<option> (mgpu-pipe ls precision)"),
        ],
    ),
)
def test_other_programs_values_lead_to_those_that_there_are(
    capsys: pytest.CaptureFixture[str], word: str, fix: str
) -> None:
    assert cli.main(["check", word]) == 2
    assert capsys.readouterr().err.endswith(f"; {fix}\n")
    key, _, option = fix.split()[1].rstrip(",").partition("=")
    assert key in KEYS or (ROOT / "conf" / key / f"{option}.yaml").exists() or "=<" in fix


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("mgpu-pipe che", {"check", "checkpoints", "checkpoint."}),
        ("mgpu-pipe strategy=s", {"strategy=single"}),
        ("mgpu-pipe check trainer.max_", {"trainer.max_steps=", "trainer.max_epochs=", "trainer.max_time="}),
        ("mgpu-pipe nonsense.", set()),
        ("mgpu-pipe check --bogus strategy=s", set()),
        ("mgpu-pipe verify --multi", {"--multirun"}),
        ("mgpu-pipe export --m", {"--max-shard-size", "--merge"}),
        ("mgpu-pipe ls opt", {"optimizer"}),
        ("mgpu-pipe checkpoints c", {"check", "compare"}),
        ("mgpu-pipe eval data.tok", {"data.tokenizer=", "data.tokenize_workers="}),
        ("mgpu-pipe eval optim", set()),
    ],
)
def test_completion(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, offered: set[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert cli.main(["-sc", "query=bash"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert set(captured.out.split()) - {"checkpoint="} == offered


def test_bash_completes_verbs_and_overrides(tmp_path: Path) -> None:
    """The function that ``-sc install=bash`` sets up, called as bash calls it."""
    program = tmp_path / "mgpu-pipe"
    start = f"import sys; sys.argv[0] = {str(program)!r}; from mgpu_pipe.cli.main import program; program()"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{start}" "$@"\n')
    program.chmod(0o755)
    script = textwrap.dedent("""
        eval "$(mgpu-pipe -sc install=bash)"
        complete -p mgpu-pipe
        for line in "mgpu-pipe gen" "mgpu-pipe check strategy=meg"; do
            COMP_LINE=$line COMP_POINT=${#line} COMP_WORDS=($line) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            hydra_bash_completion
            echo "${COMPREPLY[@]}"
        done
    """)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[1:] == ["generate", "strategy=megatron"]
    assert "hydra_bash_completion mgpu-pipe" in done.stdout.splitlines()[0]


def test_ls_lists_options_and_marks_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", "strategy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "strategy"
    descriptions = {line[4:].split()[0]: line for line in lines[1:] if line.strip()}
    assert descriptions["ddp"].startswith("    ddp ") and "Data parallelism" in descriptions["ddp"]
    assert descriptions["single"].startswith("  * single ") and "One process" in descriptions["single"]
    assert "    strategy.tp=1  a whole number or auto. Tensor-parallel size." in lines
    assert any(line.startswith("    strategy.pipeline.schedule=1f1b  gpipe or 1f1b or ") for line in lines)


def test_ls_shows_the_keys_of_each_choice_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", "objective"]) == 0
    parts = capsys.readouterr().out.split("\nkeys of ")
    keys = "objective.name=masked_lm\n    objective.mask_share=0.15  a number. Share of "
    assert [part.startswith(keys) for part in parts].count(True) == 1
    assert cli.main(["ls", "data"]) == 0
    assert "\nkeys of data.source=image_folder or image_list or image_tar or digits\n" in capsys.readouterr().out


def test_schema_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["properties"]["trainer"]["properties"]["devices"]["default"] == "auto"


def test_a_reader_that_leaves_early_causes_no_trace(tmp_path: Path) -> None:
    command = f"{sys.executable} -m mgpu_pipe schema | head -1"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("{\n", "")


Launched = tuple[list[RunConfig], dict[int, int | Exception], list[list[RunPaths]]]
"""Launched configurations, the end of each launch by its number, and the runs of each table."""
typed: list[CommandLine] = []
"""What the launcher below was told about the command line."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launched:
    """A launcher that starts no processes: what the command line hands over is what is tested here."""
    seen: list[RunConfig] = []
    typed.clear()
    ends: dict[int, int | Exception] = {}
    tables: list[list[RunPaths]] = []

    def launch(config: RunConfig, asked: CommandLine) -> Result:
        assert asked.command[0] == "mgpu-pipe"
        seen.append(config)
        typed.append(asked)
        end = ends.get(len(seen), 0)
        if isinstance(end, Exception):
            raise end
        return Result("finished", end, tmp_path / f"run{len(seen)}", asked_to_stop=len(seen) == ends.get(0))

    launches_by(monkeypatch, launch, lambda runs, write, again: tables.append(list(runs)))
    monkeypatch.chdir(tmp_path)
    return seen, ends, tables


def test_train_hands_over_the_checked_configuration(launched: Launched) -> None:
    seen, ends, _ = launched
    ends[1] = EXIT_STOPPED
    assert cli.main(["model=llama_tiny", "seed=5"]) == EXIT_STOPPED
    assert cli.main(["train", "model=llama_tiny", "seed=6"]) == 0
    assert [config.seed for config in seen] == [5, 6]


def test_a_sweep_runs_every_job_and_shows_one_table(launched: Launched, tmp_path: Path) -> None:
    seen, _, tables = launched
    words = ["strategy=ddp", "trainer.devices=1,2", "optimizer.lr=1e-3,3e-4", "trainer.accelerator=cpu"]
    assert cli.main(["-m", *words]) == 0
    assert [(config.trainer.devices, config.optimizer.lr) for config in seen] == [
        (1, 1e-3),
        (1, 3e-4),
        (2, 1e-3),
        (2, 3e-4),
    ]
    assert [[paths.root.name for paths in table] for table in tables] == [["run1", "run2", "run3", "run4"]]
    assert [entry.name for entry in tmp_path.iterdir()] == ["outputs"]
    (sweep,) = (tmp_path / "outputs" / "sweeps").iterdir()
    assert [point.status for point in Store(sweep).points()] == ["finished"] * 4


def test_a_failed_job_is_reported_and_the_others_go_on(launched: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    seen, ends, tables = launched
    ends[1] = DataError("corpus.txt: is empty")
    words = ["strategy=ddp", "trainer.devices=1,3,2", "seed=1", "trainer.accelerator=cpu"]
    assert cli.main([*words, "-m"]) == 2
    assert [config.trainer.devices for config in seen] == [1, 2]
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert errors[0].startswith(
        "error: point 2 (trainer.devices=3) cannot run: data.global_batch_size=32: not divisible"
    )
    assert errors[1:] == ["error: corpus.txt: is empty"]
    assert [len(table) for table in tables] == [1]
    (sweep,) = stores(Path("outputs"))
    assert [point.status for point in sweep.points()] == ["failed", "failed", "finished"]
    assert sweep.points()[0].reason == "corpus.txt: is empty"


def test_the_worst_exit_code_counts_and_a_stop_ends_the_sweep(
    launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, ends, _ = launched
    ends.update({1: 1, 2: EXIT_STOPPED})
    assert cli.main(["-m", "seed=1,2,3"]) == 1
    assert [config.seed for config in seen] == [1, 2]
    assert "2 of 3 runs are left, because the sweep was stopped" in capsys.readouterr().err


def test_a_signal_that_comes_too_late_for_a_run_ends_the_sweep_before_the_next(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stop, "_requested", False)
    seen, ends, tables = launched
    ends[0] = 2
    assert cli.main(["-m", "seed=1,2,3,4"]) == EXIT_STOPPED
    assert [config.seed for config in seen] == [1, 2] and [len(table) for table in tables] == [2]
    assert "2 of 4 runs are left, because the sweep was stopped" in capsys.readouterr().err


@pytest.mark.slow
def test_a_point_of_a_sweep_is_shown_as_typed_and_knows_the_words_that_start_it_alone(
    launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model=llama_tiny", "model.config.num_hidden_layers=1,2", "+optimizer.options.eps=1e-6", "seed=3"]
    (Path.cwd() / "more").mkdir()
    assert cli.main(["-m", "--config-dir", "more", *words]) == 0
    told = capsys.readouterr().err
    assert "run 1 of 2: model.config.num_hidden_layers=1" in told and "run 2 of 2: " in told
    assert "++" not in told
    assert [asked.swept for asked in typed] == [[f"model.config.num_hidden_layers={n}"] for n in (1, 2)]
    assert typed[1].alone[:2] == ["--config-dir", "more"] and "model.config.num_hidden_layers=2" in typed[1].alone
    assert cli.main(list(typed[1].alone)) == 0
    assert launched[0][2] == launched[0][1]


@pytest.mark.parametrize("verb", ["check", "verify"])
def test_a_sweep_of_a_verb_that_keeps_nothing_leaves_nothing(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model=llama_tiny", "seed=1,2", *(["strategy=nothing"] if verb == "verify" else [])]
    assert cli.main([verb, "-m", *words]) == (2 if verb == "verify" else 0)
    assert list(tmp_path.iterdir()) == []
    assert verb == "verify" or "run 2 of 2: model=llama_tiny seed=2" in capsys.readouterr().err


def test_an_empty_place_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(Path("/").iterdir())
    for words in (["run.root="], ["-m", "seed=1,2", "run.root="], ["-m", "seed=1,2", "run.root=' '"]):
        assert cli.main(["model=llama_tiny", *words]) == 2
        captured = capsys.readouterr().err
        assert "run.root=" in captured and "give a folder" in captured and "Traceback" not in captured
    assert set(Path("/").iterdir()) == before and list(tmp_path.iterdir()) == []


def test_a_deleted_working_directory_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    program = f'mkdir {gone} && cd {gone} && rmdir {gone} && exec {sys.executable} -m mgpu_pipe "$@"'
    for words in (["check", "model=llama_tiny"], ["ls"], ["report"]):
        done = subprocess.run(
            ["bash", "-c", program, "-", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: the working directory is gone")


def test_a_sweep_is_refused_in_a_world_that_others_started(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, _, _ = launched
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert cli.main(["-m", "seed=1,2"]) == 2
    assert seen == []
    assert "error: -m: a world that torchrun or srun started trains one run" in capsys.readouterr().err


def test_a_given_run_folder_is_refused_in_a_sweep(launched: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    seen, _, _ = launched
    assert cli.main(["-m", "seed=1,2", "run.dir=here"]) == 2
    assert seen == []
    assert "run.dir=here: leave it out with -m" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_plug_in_brings_configurations_and_names(tmp_path: Path) -> None:
    package = tmp_path / "site"
    (package / "plug" / "conf" / "data").mkdir(parents=True)
    (package / "plug" / "__init__.py").write_text("def poems(config):\n    yield 'a'\n")
    (package / "broken.py").write_text("raise RuntimeError('no such\\nlibrary')\n")
    (package / "plug" / "conf" / "data" / "poems.yaml").write_text("# Poems.\nsource: poems\n")
    (package / "plug-1.0.dist-info").mkdir()
    (package / "plug-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (package / "plug-1.0.dist-info" / "entry_points.txt").write_text(
        "[mgpu_pipe.data]\npoems = plug:poems\nbroken = broken:texts\nmissing = plug:prose\nmodule = plug\n"
        "[mgpu_pipe.objectives]\npoetry = plug:poems\n"
    )
    search_path = f"hydra.searchpath=[file://{package}/plug/conf]"
    path = f"{ROOT}{os.pathsep}{package}"
    done = mgpu_pipe("check", search_path, "data=poems", folder=tmp_path, PYTHONPATH=path)
    assert (done.code, done.err) == (0, "")
    assert "poems (plug-in)" in done.out
    done = mgpu_pipe("check", search_path, "data.source=poms", folder=tmp_path, PYTHONPATH=path)
    assert "data.source=poms: did you mean poems?" in done.err
    for override, said in (
        ("data.source=broken", "broken:texts cannot be imported (RuntimeError: no such library); correct that package"),
        ("data.source=missing", "the entry point plug:prose cannot be imported (AttributeError: "),
        ("data.source=module", "the entry point names a module, not a function; register a function"),
        ("objective.name=poetry", "poems, which is no such class; register a subclass of mgpu_pipe.objectives.base."),
    ):
        done = mgpu_pipe("check", override, folder=tmp_path, PYTHONPATH=path)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done.err
        assert done.err.startswith(f"error: {override}: ") and said in done.err


@pytest.mark.slow
def test_the_wheel_carries_every_package_the_conf_tree_and_the_licence_and_runs_from_any_folder(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("mgpu_pipe", "conf", "pyproject.toml", "setup.py", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(sources)], check=True)
    (sources / "README.md").write_text("x")
    program = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    build = [sys.executable, "-c", program, str(tmp_path)]
    wheel = subprocess.run(build, cwd=sources, capture_output=True, text=True, check=True).stdout.split()[-1]
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        shipped = {name for name in archive.namelist() if name.startswith("mgpu_pipe/conf/")}
        code = {name for name in archive.namelist() if name.endswith(".py")}
        archive.extractall(tmp_path / "installed")
    (metadata,) = (tmp_path / "installed").glob("mgpu_pipe-*.dist-info/METADATA")
    assert {"License-Expression: Apache-2.0 AND MIT", "License-File: LICENSE"} <= set(metadata.read_text().splitlines())
    text = (metadata.parent / "licenses" / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert shipped == {f"mgpu_pipe/conf/{file.relative_to(ROOT / 'conf')}" for file in (ROOT / "conf").rglob("*.yaml")}
    assert code == {str(file.relative_to(ROOT)) for file in (ROOT / "mgpu_pipe").rglob("*.py")}
    page = {file.name for file in (ROOT / "mgpu_pipe/report/static").iterdir()}
    assert {file.name for file in (tmp_path / "installed/mgpu_pipe/report/static").iterdir()} == page
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = mgpu_pipe("check", "experiment=quickstart", folder=elsewhere, path=tmp_path / "installed")
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("params", [".seed='\"1,2\"'", "={seed:'1,2'}"])
def test_values_to_sweep_below_what_is_null_are_one_line(params: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "-m", "model=llama_tiny", "data=synthetic", f"+hydra.sweeper.params{params}"]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("error: an override sets a part of what is null") and "-m KEY=1,2" in line


def test_an_empty_run_folder_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "model=llama_tiny", "data=synthetic", "run.dir="]) == 2
    assert capfd.readouterr().err == "error: run.dir=: give a folder, or leave it out\n"
