"""The report is one well-formed file that asks for nothing else and runs nothing of a run's own text.

Oracle: the standard library's HTML parser.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import RunFolderError
from mgpu_pipe.report.charts import charts
from mgpu_pipe.report.html import write_report
from mgpu_pipe.report.numbers import TIMES
from mgpu_pipe.report.run_view import load_run
from mgpu_pipe.runs.metrics_file import RANK_COLUMNS, MetricsWriter
from tests.report.fake_runs import MakeRun

VOID = {"meta", "link", "br", "img", "input", "hr"}
LOADING = {"src", "href", "srcset", "action", "data", "poster", "xlink:href", "formaction"}
HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">${7*7}{{ 7*7 }}</pre></style>'


class Page(HTMLParser):
    """Elements, text and scripts of a page; fails on a tag that is closed out of order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.data = ""
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            if self.elements[-1][1].get("type") == "application/json":
                self.data += data
            else:
                self.scripts.append(data)
        else:
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def page_of(*runs: RunPaths) -> Page:
    out = runs[0].root / "report.html"
    assert write_report(list(runs), out) == out
    return Page(out.read_text(encoding="utf-8"))


def test_samples_that_are_left_out_are_counted(make_run: MakeRun) -> None:
    data = {"train_samples": 30, "too_long_samples": 9, "on_too_long": "drop", "bad_samples": 2}
    words = page_of(make_run(steps=60, summary={"data": data})).words
    for told in ("samples that do not fit 9", "what becomes of them drop", "samples that cannot be used 2"):
        assert told in words, told


def test_a_transcript_names_missed_words_and_keeps_its_own_asterisks(make_run: MakeRun) -> None:
    pytest.importorskip("jiwer")
    from mgpu_pipe.inference.audio_samples import mark_mistakes

    said, heard = "please press * * * now", "please * * * now then"
    sample = {"prompt": said, "text": f" \u2192 {mark_mistakes(said, heard)}"}
    words = page_of(make_run(steps=60, summary={"samples": [sample]})).words
    assert f"{said} \u2192 {heard} missed: press; added: then" in words
    assert words.count("* * *") == 2


def test_the_page_is_well_formed_and_tells_the_key_figures(make_run: MakeRun) -> None:
    run = make_run(steps=60, summary={"metrics": {"train/loss": 3.25, "val/loss": 3.5, "val/perplexity": 33.1154}})
    words = page_of(run).words
    for told in (
        "quickstart finished",
        "Held-out perplexity 33.12",
        f"unigram baseline 742.8, 22.4{TIMES} lower",
        "Training loss 3.2500",
        "7.9M parameters",
        "dp_replicate=2",
        "optimizer.lr=0.003",
        "def read_lines(path",
        f"32 samples = 2 processes {TIMES} 2 micro-batches {TIMES} 8; 8,192 tokens a step",
        "AMD EPYC 7B13",
        "documents 1,702",
    ):
        assert told in words, told


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_outside_the_file_is_referred_to(make_run: MakeRun, count: int) -> None:
    page = page_of(*(make_run(steps=60, folder=f"2026-01-01_00-00-0{at}-aaaaaaaa", seed=at) for at in range(count)))
    text = (page_text := "".join(page.text)) + page.data + "".join(page.scripts)
    assert re.findall(r"\w*://[^ )]*", text) == ["https://github.com/leeoniya/uPlot"], "the library's name for itself"
    assert "@import" not in page_text
    assert "url(" not in page_text
    assert not any(LOADING & set(attributes) for _, attributes in page.elements)
    assert not {"link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.elements}


def test_it_fits_a_phone_and_both_colour_schemes(make_run: MakeRun) -> None:
    page = page_of(make_run(steps=60))
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.elements
    style = "".join(page.text)
    assert "prefers-color-scheme: dark" in style
    assert "max-width: 760px" in style


def test_text_of_the_run_is_shown_and_never_markup(make_run: MakeRun) -> None:
    run = make_run(
        name="evil",
        steps=60,
        overrides=(f"model.name={HOSTILE}",),
        config={"run": {"name": HOSTILE}, "model": {"name": HOSTILE, "type": HOSTILE}},
        summary={
            "samples": [{"prompt": HOSTILE, "text": HOSTILE}],
            "topology": HOSTILE,
            "status": HOSTILE,
            "attempts": [{HOSTILE: HOSTILE}],
            "model": {HOSTILE: {HOSTILE: HOSTILE}, "name": HOSTILE},
            "error": HOSTILE,
        },
    )
    run.environment.write_text(json.dumps({HOSTILE: HOSTILE, "packages": {HOSTILE: HOSTILE}}))
    table = run.metrics.read_text().splitlines()
    hostile_column = '"' + HOSTILE.replace('"', '""') + '"'
    run.metrics.write_text("\n".join([f"{table[0]},{hostile_column}", *(f"{line},1.5" for line in table[1:])]) + "\n")
    for runs in ([run], [run, make_run(steps=60)]):
        page = page_of(*runs)
        tags = [tag for tag, _ in page.elements]
        assert tags.count("script") == 2, "the data, which is no script, and the one script"
        assert "img" not in tags
        assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
        assert HOSTILE in page.words


def test_the_security_policy_names_the_one_script_and_allows_no_request(make_run: MakeRun) -> None:
    page = page_of(make_run(steps=60))
    policy = next(attributes for tag, attributes in page.elements if attributes.get("http-equiv"))["content"] or ""
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy


def test_secrets_do_not_reach_the_page(make_run: MakeRun) -> None:
    run = make_run(
        steps=60,
        overrides=("logger.wandb.api_key=s3cr3t-a", "++callbacks.x.password='s3cr3t-b'", "data.tokenizer=kept-one"),
        config={"logger": {"wandb": {"api_key": "s3cr3t-a", "project": "kept-two"}, "x": [{"hf_token": "s3cr3t-c"}]}},
    )
    run.environment.write_text(json.dumps({"command": ["mgpu-pipe", "logger.wandb.api_key=s3cr3t-a"]}))
    text = page_of(run).words
    assert "s3cr3t" not in text
    assert text.count("(hidden)") >= 5
    assert "kept-one" in text
    assert "kept-two" in text
    interpolated = page_of(make_run(steps=60, name="other")).words
    assert "api_key: ${oc.env:WANDB_API_KEY}" in interpolated
    assert "(hidden)" not in interpolated


def test_figures_of_classes_and_their_calibration_are_shown(make_run: MakeRun) -> None:
    counts = {"samples": [4, 5], "right": [3, 0], "predicted": [8, 1]}
    found = {"classes": counts, "confusion": [[3, 1], [5, 0]], "calibration": {"expected_error": 0.125, "bins": []}}
    shot = {"names": [f"kind {at}" for at in range(60)], "classes": {name: [2] * 60 for name in counts}}
    summary = {"found": {**found, "zero_shot": shot}, "data": {"classes": ["cat", "<dog>"]}}
    words = page_of(make_run(steps=6, summary=summary)).words
    for row in (
        "Classes expected calibration error 12.50%",
        "cat 4 75.00% 37.50% <dog> <dog> 5 0.00% 0.00% cat",
        "Zero-shot classes the 20 least accurate of 60 classes",
    ):
        assert row in words, row
    broken = {"found": {**found, "classes": {"samples": [1]}}, "data": {"classes": ["cat", "dog"]}}
    assert "expected calibration" not in page_of(make_run(name="other", steps=6, summary=broken)).words


def test_a_run_that_has_only_begun_has_a_report(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    for path in (run.summary, run.environment, run.overrides, run.metrics):
        path.unlink()
    words = page_of(run).words
    assert "unfinished" in words
    assert "nothing measured yet" in words
    assert "Steps 0 of 60" in words


def test_a_killed_run_is_told_from_its_metrics(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    run.summary.unlink()
    with open(run.metrics, "a") as file:
        file.write("61,3.1")
    words = page_of(run).words
    assert "unfinished" in words
    assert "Steps 60 of 60" in words
    assert "Held-out perplexity" in words


def test_a_failed_run_shows_the_error_of_the_rank_that_failed_first(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    run.summary.unlink()
    for rank, (message, time, follows) in enumerate([("gloo: peer", 1.0, True), ("the cause", 2.0, False)]):
        run.rank_error(rank).write_text(json.dumps({"message": message, "time": time, "follows": follows}))
    words = page_of(run).words
    assert "quickstart failed" in words
    assert "the cause" in words
    assert "gloo: peer" not in words


def test_an_error_in_the_summary_is_shown_as_its_message(make_run: MakeRun) -> None:
    error = {"rank": 1, "type": "NonFiniteError", "message": "loss is not finite at step 7"}
    words = page_of(make_run(steps=60, summary={"status": "failed", "error": error})).words
    assert "loss is not finite at step 7" in words
    assert "NonFiniteError" not in words


def test_broken_files_are_named_and_the_rest_is_shown(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    run.summary.write_text('{"status": "fini')
    run.environment.write_bytes(b"\xff\xfe")
    run.config.write_text("a: [1\n")
    words = page_of(run).words
    for name in ("summary.json is not valid JSON", "environment.json is not valid JSON", "config.yaml is not valid"):
        assert name in words
    assert "Training loss" in words


def test_memory_and_times_of_each_rank_are_curves(make_run: MakeRun) -> None:
    run = make_run(steps=60, summary={"world_size": 9})
    for rank in range(9):
        writer = MetricsWriter(run.rank_metrics(rank), columns=RANK_COLUMNS)
        for step in range(1, 61):
            writer.append({"step": step, "data_s": 0.01 * rank, "cpu_s": 1.0, "peak_gib": 2.0 + rank})
        writer.close()
    memory, computed, waited = charts([load_run(run)])[-3:]
    assert [curve["label"] for curve in memory["drawn"]["curves"]] == [f"rank {rank}" for rank in range(8)]
    assert memory["drawn"]["curves"][3]["y"] == [5.0] * 60 and set(computed["drawn"]["curves"][0]["y"]) == {1.0}
    assert waited["drawn"]["curves"][7]["y"][-1] == 0.07 and "ranks 0 to 7 of 9" in memory["note"]
    assert "Waiting for data of each rank" in page_of(run).words
    run.rank_metrics(0).unlink()
    run.rank_metrics(0).mkdir()
    assert "rank-0.csv" in page_of(run).words


def test_an_incomplete_checkpoint_is_marked(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    (run.checkpoints / "step-00000030" / "manifest.json").unlink()
    (run.checkpoints / "step-00000099.partial").mkdir()
    words = page_of(run).words
    assert "30 68 KiB incomplete, never used 60 68 KiB complete" in words
    assert "99" not in words.split("Checkpoints")[1][:80], "what was never committed is no checkpoint"


def test_a_comparison_shows_what_differs_and_marks_the_best(make_run: MakeRun) -> None:
    runs = [
        make_run(folder=f"2026-01-01_00-00-0{at}-aaaaaaaa", steps=60, lr=lr, summary={"metrics": {"val/loss": loss}})
        for at, (lr, loss) in enumerate([(1e-3, 3.5), (3e-3, 3.2), (4e-3, 3.9)])
    ]
    page = page_of(*runs)
    assert "Comparison of 3 runs" in page.words
    for told in ("1 · optimizer.lr=0.001", "2 · optimizer.lr=0.003", "held-out loss", "3.2000"):
        assert told in page.words
    table = (runs[0].root / "report.html").read_text().split("<tbody>")[1].split("</tbody>")[0]
    best = [cell.strip() for cell in re.findall(r'class="n best"[^>]*>([^<]*)<', table)]
    assert "3.2000" in best
    assert "24.53" in best
    assert "3.5000" in table
    assert "3.5000" not in best
    assert "trainer.devices" not in table, "what all runs share is no difference"


def test_a_comparison_links_the_reports_that_there_are(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(steps=60, name=name) for name in ("a b", "javascript:alert(1)", "without")]
    for run in runs[:2]:
        write_report([run], run.report)
    page = Page(write_report(runs, tmp_path / "outputs" / "comparison.html").read_text())
    links = [attributes["href"] or "" for tag, attributes in page.elements if tag == "a"]
    assert all(link.startswith("./") for link in links)
    assert [tmp_path / "outputs" / unquote(link) for link in links] == [run.report for run in runs[:2]]


def test_a_comparison_shows_every_key_that_differs(make_run: MakeRun) -> None:
    data = {"seq_len": 512, "paths": ["a", "b"]}
    page = page_of(
        make_run(steps=60, name="a", config={"seed": None}), make_run(steps=60, name="b", config={"data": data})
    )
    told = page.words.split("What differs in the configuration key 1 2 ")[1]
    for row in ("seed null 1234", "data.seq_len 256 512", "data.paths \u2013 [a, b]"):
        assert row in told
    assert "optimizer.lr 0" not in told, "what is alike"


@pytest.mark.slow
def test_many_runs_and_long_runs_stay_small(make_run: MakeRun) -> None:
    runs = [make_run(folder=f"2026-01-01_00-00-{at:02d}-aaaaaaaa", steps=60, seed=at) for at in range(20)]
    assert len(json.loads(page_of(*runs).data)["charts"][0]["curves"]) == 40
    long = make_run(steps=10_000, name="long")
    assert page_of(long)
    assert long.report.stat().st_size < 400_000


def test_runs_that_measured_the_same_share_a_curve_that_says_so(make_run: MakeRun) -> None:
    folders = [f"2026-01-01_00-00-0{at}-aaaaaaaa" for at in range(3)]
    page = page_of(*(make_run(folder=name, steps=60, seed=seed) for name, seed in zip(folders, (0, 1, 0), strict=True)))
    labels = [curve["label"] for curve in json.loads(page.data)["charts"][0]["curves"]]
    assert labels == ["1 = 3", "2", "1 = 3, held out", "2, held out"]
    assert "1 = 3, identical" in page.words


def test_the_data_cannot_end_its_element(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    first, *rows = run.metrics.read_text().splitlines()
    run.metrics.write_text("\n".join([f"{first},</script><u>", *(f"{row},1.5" for row in rows)]) + "\n")
    page = page_of(run)
    assert "</script><u>" in [chart["up"] for chart in json.loads(page.data)["charts"]]
    assert "u" not in {tag for tag, _ in page.elements}


def test_what_is_no_run_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(RunFolderError, match=str(folder)):
            write_report([RunPaths(folder)], tmp_path / "out.html")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_place_that_cannot_be_written_is_one_line_and_keeps_the_old_report(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(steps=60)
    with pytest.raises(RunFolderError, match=r"cannot write the report .*--out"):
        write_report([run], tmp_path / "no" / "report.html")
    (tmp_path / "taken").mkdir()
    with pytest.raises(RunFolderError, match="cannot write"):
        write_report([run], tmp_path / "taken")
    assert not list(tmp_path.glob(".*partial"))
