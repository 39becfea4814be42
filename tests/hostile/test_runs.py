"""Somebody else's run: each trick changes one thing in its folder. Oracle: the kernel's record of what is touched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mgpu_pipe.checkpoint.chunks import record_of
from mgpu_pipe.checkpoint.manifest import read_manifest
from tests.hostile.support import (
    SECRET,
    attempt,
    cases,
    code,
    outside,
    refused_early,
    replaced_by_link,
    replaced_by_pipe,
    sparse,
)
from tests.inference.support import write_texts

STEP = "checkpoints/step-00000003"
HUGE = 1 << 42
GENERATE = ("generate", "RUN", "--prompt", "the", "--max-new-tokens", "2")
EVAL, REPORT, LIST = ("eval", "RUN"), ("report", "RUN"), ("checkpoints", "list", "RUN")
CHECK, EXPORT = ("checkpoints", "check", "RUN", "--full"), ("export", "RUN", "--out", "exported")
PRUNE = ("checkpoints", "prune", "RUN", "--keep-last", "1", "--yes")
RESUME = ("model=llama_tiny", "data=synthetic", "trainer.max_steps=1", "logger=none", "checkpoint.resume=RUN")
INIT = ("model=llama_tiny", "data=synthetic", "trainer.max_steps=1", "logger=none", "checkpoint.init_from=RUN")
Trick = Callable[[Path, Path], object]


def sealed(run: Path) -> None:
    """Make the manifest fit the changed small files, as an attacker would."""
    step = run / STEP
    manifest = read_manifest(step)
    records = {
        name: record_of((step / name).read_bytes()) if name in ("config.yaml", "state.json") else record
        for name, record in manifest.files.items()
    }
    (step / "manifest.json").write_bytes(replace(manifest, files=records).encode())


def logged(trick: Trick) -> Trick:
    """``trick``, in a run that has a folder of logs."""

    def both_of(run: Path, out: Path) -> None:
        (run / "logs").mkdir(exist_ok=True)
        trick(run, out)

    return both_of


def configured(**changes: Any) -> Trick:
    """Values of the configuration by dotted key; OUT is the place outside."""

    def trick(run: Path, out: Path) -> None:
        values = yaml.safe_load((run / "config.yaml").read_text())
        for key, value in changes.items():
            *sections, last = key.split("__")
            node = values
            for name in sections:
                node = node.setdefault(name, {})
            node[last] = yaml.safe_load(yaml.safe_dump(value).replace("OUT", str(out)))
        written(yaml.safe_dump(values))(run, out)

    return trick


def written(text: str) -> Trick:
    def trick(run: Path, out: Path) -> None:
        for folder in (run, run / STEP):
            (folder / "config.yaml").write_text(text)
        sealed(run)

    return trick


def state(**changes: Any) -> Trick:
    def trick(run: Path, out: Path) -> None:
        path = run / STEP / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        sealed(run)

    return trick


def pipe(name: str) -> Trick:
    return lambda run, out: replaced_by_pipe(run / name)


def link(name: str, target: str = "secret.json") -> Trick:
    return lambda run, out: replaced_by_link(run / name, out / target)


def large(name: str) -> Trick:
    return lambda run, out: sparse(run / name, HUGE)


def text(name: str, content: str) -> Trick:
    return lambda run, out: (run / name).write_text(content)


def in_turn(*tricks: Trick) -> Trick:
    return lambda run, out: [trick(run, out) for trick in tricks]


def moved(name: str) -> Trick:
    """A folder is outside, and a link to it in its place."""

    def trick(run: Path, out: Path) -> None:
        shutil.move(run / name, out / "moved")
        (run / name).symlink_to(out / "moved")

    return trick


def manifest(change: Callable[[dict[str, Any]], None]) -> Trick:
    """A change of the manifest, its root hash made right again."""

    def trick(run: Path, out: Path) -> None:
        from mgpu_pipe.checkpoint.manifest import _root_hash

        path = run / STEP / "manifest.json"
        value = json.loads(path.read_text())
        value.pop("root")
        change(value)
        path.write_text(json.dumps({**value, "root": _root_hash(value)}))

    return trick


def _first(value: dict[str, Any]) -> dict[str, Any]:
    return next(iter(value["tensors"]["model"].values()))


def _many_boxes(value: dict[str, Any]) -> None:
    tensor, file = _first(value), next(name for name in value["files"] if name.startswith("model"))
    tensor["shape"] = [400, 400]
    tensor["boxes"] = [[[row, column], [1, 2], file] for row in range(400) for column in range(0, 400, 2)][:-1]


def _entangled(value: dict[str, Any]) -> None:
    """Long boxes side by side, each pair of them bridged: no straight cut parts them."""
    tensor, file = _first(value), next(name for name in value["files"] if name.startswith("model"))
    tensor["shape"] = [30_000, 4, 30_000]
    tensor["boxes"] = [[[row, 0, row], [2, 1, 30_000 - row], file] for row in range(29_000)]


def _negative(value: dict[str, Any]) -> None:
    _first(value)["boxes"][0][0][0] = -1


def _elsewhere(value: dict[str, Any]) -> None:
    value["files"]["../../../outside/secret.txt"] = next(iter(value["files"].values()))


def _astronomic(value: dict[str, Any]) -> None:
    _first(value)["shape"][0] = 10**9
    _first(value)["boxes"][0][1][0] = 10**9


def header(content: bytes, length: int | None = None) -> Trick:
    """Another header of the tensor file, at the same size of the file."""

    def trick(run: Path, out: Path) -> None:
        path = next((run / STEP).glob("model-*.safetensors"))
        new = (len(content) if length is None else length).to_bytes(8, "little") + content
        path.write_bytes(new + path.read_bytes()[len(new) :])

    return trick


def tokenizer_setting(**changes: Any) -> Trick:
    def trick(run: Path, out: Path) -> None:
        path = run / "tokenizer" / "tokenizer_config.json"
        settings = json.loads(json.dumps({**json.loads(path.read_text()), **changes}).replace("OUT", str(out)))
        path.write_text(json.dumps(settings))
        (run / "tokenizer" / "evil.py").write_text(code(out) + "class Tokenizer: pass\n")

    return trick


def both(*tricks: Trick) -> Trick:
    def trick(run: Path, out: Path) -> None:
        for one in tricks:
            one(run, out)

    return trick


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(12)
)
MARKUP = "<script>alert(1)</script>\x1b[31m\x1b]0;owned\x07"
SYNTHETIC: dict[str, Any] = {"data__source": "synthetic", "data__paths": []}
TRICKS: dict[str, tuple[Trick, tuple[str, ...], int | None]] = {
    "aliases": (written(BOMB), GENERATE, 2),
    "aliases_report": (written(BOMB), REPORT, 0),
    "nested": (written("a: " + "[" * 5000 + "]" * 5000), GENERATE, 2),
    "many_keys": (written("".join(f"k{n}: 1\n" for n in range(50_000))), GENERATE, 2),
    "no_mapping": (written("[1, 2]"), EVAL, 2),
    "config_pipe": (pipe("config.yaml"), REPORT, 2),
    "config_pipe_of_the_step": (pipe(f"{STEP}/config.yaml"), GENERATE, 2),
    "lock_pipe_report": (pipe(".lock"), REPORT, 0),
    "log_pipe": (logged(pipe("logs/rank-0.log")), REPORT, 0),
    "log_link": (logged(link("logs/rank-0.log", "secret.txt")), REPORT, 0),
    "log_large": (logged(large("logs/rank-0.log")), REPORT, 0),
    "samples_pipe": (pipe("samples.jsonl"), REPORT, 0),
    "config_link": (link("config.yaml", "secret.yaml"), REPORT, 0),
    "config_link_of_the_step": (link(f"{STEP}/config.yaml", "secret.yaml"), EVAL, 2),
    "config_large": (large("config.yaml"), REPORT, 0),
    "paths": (configured(data__paths=["OUT/*.txt"]), EVAL, 2),
    "paths_below": (configured(data__paths=["OUT/**/*.txt"]), EVAL, 2),
    "validation_paths": (configured(data__validation_paths=["OUT/secret.txt"], data__source="synthetic"), EVAL, 2),
    "cache": (configured(data__cache_dir="OUT/cache", **SYNTHETIC), EVAL, None),
    "tokenizer": (configured(data__tokenizer="OUT/secret.json", **SYNTHETIC), EVAL, None),
    "template": (configured(data__chat_template="OUT/secret.txt", **SYNTHETIC), EVAL, None),
    "environment": (configured(run__name="${oc.env:SECRET_NAME}"), REPORT, 0),
    "environment_paths": (configured(data__paths=["${oc.env:SECRET_NAME}/*"]), EVAL, 2),
    "environment_number": (configured(optimizer__lr="${oc.env:SECRET_NAME}"), GENERATE, 2),
    "interpolations": (configured(**{"run__name": "${run.root}" * 40, "run__root": "${run.name}" * 40}), GENERATE, 0),
    "model_path": (configured(model__path="OUT", model__type=None), GENERATE, 2),
    "layers": (configured(model__config__num_hidden_layers=10_000_000), GENERATE, 2),
    "layers_in_bounds": (configured(model__config__num_hidden_layers=60_000), GENERATE, 2),
    "layers_no_number": (configured(model__config__num_hidden_layers=1e7), EXPORT, 2),
    "vocabulary": (configured(model__config__vocab_size=1 << 40), GENERATE, 2),
    "vocabulary_in_bounds": (configured(model__config__vocab_size=200_000_000), EXPORT, 2),
    "labels": (configured(model__config__num_labels=1 << 40), GENERATE, 2),
    "type": (configured(model__type="../../outside/x"), GENERATE, 2),
    "sequence": (configured(data__seq_len=1 << 50, **SYNTHETIC), EVAL, 2),
    "documents": (configured(data__synthetic={"num_documents": 1 << 50}, **SYNTHETIC), EVAL, 2),
    "workers": (configured(data__tokenize_workers=1 << 20, **SYNTHETIC), EVAL, None),
    "state_pipe": (pipe(f"{STEP}/state.json"), GENERATE, 2),
    "state_link": (link(f"{STEP}/state.json"), CHECK, 1),
    "state_nested": (in_turn(text(f"{STEP}/state.json", '{"x":' * 90_000), lambda run, out: sealed(run)), LIST, 1),
    "state_text": (state(precision=MARKUP, topology={MARKUP: 2}), LIST, 0),
    "manifest_pipe": (pipe(f"{STEP}/manifest.json"), LIST, 1),
    "manifest_link": (link(f"{STEP}/manifest.json"), GENERATE, 2),
    "manifest_large": (large(f"{STEP}/manifest.json"), CHECK, 1),
    "manifest_negative": (manifest(_negative), GENERATE, 2),
    "manifest_elsewhere": (manifest(_elsewhere), CHECK, 1),
    "manifest_boxes": (manifest(_many_boxes), LIST, 1),
    "manifest_entangled": (manifest(_entangled), LIST, 1),
    "manifest_astronomic": (manifest(_astronomic), GENERATE, 2),
    "weights_link": (
        lambda run, out: replaced_by_link(next((run / STEP).glob("model-*.safetensors")), out / "secret.json"),
        GENERATE,
        2,
    ),
    "weights_pipe": (lambda run, out: replaced_by_pipe(next((run / STEP).glob("model-*.safetensors"))), CHECK, 1),
    "weights_zero": (
        lambda run, out: replaced_by_link(next((run / STEP).glob("model-*.safetensors")), "/dev/zero"),
        CHECK,
        1,
    ),
    "weights_header": (header(b"{}", 1 << 62), GENERATE, 2),
    "weights_overlap": (
        header(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],'
            b'"data_offsets":[4,12]}}'
        ),
        EXPORT,
        2,
    ),
    "step_link": (moved(STEP), GENERATE, 2),
    "step_link_resume": (moved(STEP), RESUME, 2),
    "step_link_init": (moved(STEP), INIT, 2),
    "checkpoints_link": (moved("checkpoints"), LIST, 2),
    "checkpoints_link_export": (moved("checkpoints"), EXPORT, 2),
    "step_number": (lambda run, out: (run / STEP).rename(run / "checkpoints" / f"step-{'9' * 60}"), LIST, 1),
    "tokenizer_link": (link("tokenizer/tokenizer.json"), EXPORT, 2),
    "vocabulary_link": (link("tokenizer/vocab.txt", "secret.txt"), EXPORT, 2),
    "tokenizer_pipe": (pipe("tokenizer/tokenizer.json"), GENERATE, 2),
    "tokenizer_folder_link": (moved("tokenizer"), GENERATE, 2),
    "tokenizer_code": (tokenizer_setting(auto_map={"AutoTokenizer": ["evil.Tokenizer", None]}), GENERATE, 0),
    "tokenizer_file": (tokenizer_setting(tokenizer_file="OUT/secret.json", vocab_file="OUT/x"), GENERATE, None),
    "tokenizer_class": (tokenizer_setting(tokenizer_class="os.system"), EXPORT, None),
    "tokenizer_template": (tokenizer_setting(chat_template="{% for i in range(10**12) %}x{% endfor %}"), GENERATE, 0),
    "tokenizer_broken": (text("tokenizer/tokenizer.json", "[" * 100_000), GENERATE, 2),
    "summary_pipe": (pipe("summary.json"), REPORT, 0),
    "summary_nested": (text("summary.json", "[" * 200_000), REPORT, 0),
    "summary_link": (link("summary.json"), REPORT, 0),
    "environment_large": (large("environment.json"), REPORT, 0),
    "metrics_large": (large("metrics.csv"), REPORT, 0),
    "metrics_link": (link("metrics.csv", "secret.txt"), REPORT, 0),
    "overrides_zero": (lambda run, out: replaced_by_link(run / "overrides.txt", "/dev/zero"), REPORT, 0),
    "error_pipe": (in_turn(lambda run, out: (run / "logs").mkdir(), pipe("logs/rank-0.error.json")), REPORT, 0),
    "report_link": (link("report.html", "secret.txt"), REPORT, 0),
    "markup": (
        both(
            configured(run__name=MARKUP),
            text(
                "summary.json",
                json.dumps({"status": MARKUP, "samples": [{"prompt": MARKUP, "text": MARKUP}], "error": MARKUP}),
            ),
        ),
        REPORT,
        0,
    ),
    "two_reports": (configured(run__name=MARKUP), ("report", "RUN", "RUN/../run", "--out", "both.html"), 0),
    "lock_link": (link(".lock", "secret.txt"), PRUNE, 2),
    "lock_pipe": (pipe(".lock"), PRUNE, 2),
    "pickle": (text("pytorch_model.bin", "cos\nsystem\n(S'true'\ntR."), GENERATE, 0),
    "code": (lambda run, out: (run / "sitecustomize.py").write_text(code(out)), EXPORT, 0),
}


LATE = ("paths", "paths_below", "validation_paths", "environment_paths", "sequence", "documents")
"""Tricks that wait for ``eval``, which judges the data when it has the model."""


@pytest.mark.parametrize(
    "trick",
    cases(
        TRICKS,
        """
    nested no_mapping config_pipe_of_the_step config_link config_large paths_below validation_paths tokenizer template
    environment environment_number layers_no_number layers_in_bounds vocabulary documents workers state_nested
    state_text manifest_link manifest_large manifest_elsewhere manifest_boxes weights_pipe weights_overlap
    step_link_init
    checkpoints_link_export step_number vocabulary_link tokenizer_pipe tokenizer_template summary_nested summary_link
    environment_large metrics_link overrides_zero two_reports lock_pipe pickle""",
    ),
)
def test_a_run(trick: str, made: Path, tmp_path: Path, cache: Path) -> None:
    change, words, expected = TRICKS[trick]
    work, forbidden = tmp_path / "work", outside(tmp_path / "outside")
    run = Path(shutil.copytree(made, work / "run"))
    change(run, forbidden)
    ended, said = attempt([word.replace("RUN", str(run)) for word in words], work, cache, forbidden)
    assert expected in (None, ended), said
    if words == REPORT and ended == 0:
        page = (run / "report.html").read_text()
        assert "<script>alert" not in page and "do not read" not in page and SECRET not in page
        assert not (run / "report.html").is_symlink()
    if (work / "exported").exists():
        assert not any("do not read" in path.read_text(errors="replace") for path in (work / "exported").iterdir())


def test_files_that_the_command_line_names_are_read(made: Path, tmp_path: Path, cache: Path) -> None:
    run, forbidden = Path(shutil.copytree(made, tmp_path / "run")), outside(tmp_path / "outside")
    configured(data__paths=["OUT/*.txt"])(run, forbidden)
    texts = write_texts(tmp_path / "mine", 12)
    ended, said = attempt(["eval", str(run), f"data.paths=[{texts}/*.txt]"], tmp_path, cache, forbidden)
    assert ended == 0 and "perplexity" in said, said


@pytest.mark.slow
def test_it_is_refused_before_anything_slow_is_imported(made: Path, tmp_path: Path, cache: Path) -> None:
    refused_early(TRICKS, LATE, made, tmp_path, cache)
