"""The documentation: its site builds without a warning, every key is in it, and every command on its pages runs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.cli.verbs import verb_names
from mgpu_pipe.config.json_schema import json_schema
from mgpu_pipe.data.arrays import ArrayData
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.training.strategy import EngineStrategy
from tests.support.command import REPOSITORY, environment
from tests.support.documented import ELSEWHERE, blocks, overrides, pages, run
from tests.support.hub import TOKEN, files_of, local_hub
from tests.support.needs import need_digits, need_speech
from tests.support.pictures import folder_of_classes
from tests.support.program import python, run_program
from tests.support.sounds import tones, write_wav

PAGES = [str(page.relative_to(REPOSITORY)) for page in pages()]
WITH_COMMANDS = [page for page in PAGES if any(b.commands or b.shown for b in blocks(REPOSITORY / page))]
LONG = tuple(
    f"docs/{page}.md"
    for page in (
        *("guides/strategies", "guides/embeddings", "guides/rerankers", "guides/adapters"),
        *("tutorials/own_experiments", "guides/distillation", "reference/recipes", "guides/hub", "guides/python"),
        *("guides/nodes", "guides/steadier", "guides/sweeps", "guides/doctor", "guides/images"),
        *("guides/vision_language", "guides/parameter_groups", "guides/speech", "reference/checkpoint_format"),
        *("guides/own_text", "guides/planning", "guides/serving", "guides/own_hardware", "guides/preferences"),
        *("guides/evaluation", "guides/logging", "guides/chat", "tutorials/start", "tutorials/move"),
        *("guides/answers", "guides/mixture", "guides/own_data", "guides/own_objective", "guides/videos"),
    )
)
"""Pages whose commands other tests try in their like; ``make test-all`` runs them."""


def keys(properties: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, entry in properties.items():
        if "properties" in entry:
            yield from keys(entry["properties"], f"{prefix}{name}.")
        elif name not in ("defaults", "hydra"):
            yield prefix + name


@pytest.mark.slow
def test_the_site_builds_and_has_every_key_verb_and_seam(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(
            package, reason="the site is built by Sphinx; on Python 3.11 or newer: pip install '.[docs]'"
        )
    copy = shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")  # a build leaves nothing in the tree
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    command = ["-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-b", "html"]
    known = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = run_program([*command, str(copy), str(tmp_path / "site")], tmp_path, known, 300, python)
    assert done.returncode == 0, done.stderr[-3000:]
    reference = (tmp_path / "site" / "reference" / "keys.html").read_text(encoding="utf-8")
    shown = set(re.findall(r'<td><p><code[^>]*><span class="pre">([\w.]+)</span></code></p></td>', reference))
    expected = set(keys(json_schema()["properties"]))
    assert len(expected) > 100 and shown >= expected, sorted(expected - shown)
    said = (tmp_path / "site" / "reference" / "verbs.html").read_text(encoding="utf-8")
    assert all(f"usage: mgpu-pipe {'[train]' if verb == 'train' else verb}" in said for verb in verb_names())
    classes = (tmp_path / "site" / "reference" / "plugin_classes.html").read_text(encoding="utf-8")
    for seam in (ArrayData, EngineStrategy, Objective):
        wanted = {name for name in seam.__abstractmethods__ if not name.startswith("_")}
        assert {name for base in seam.__mro__ for name in wanted if id_of(base, name) in classes} == wanted


def id_of(defined_in: type, name: str) -> str:
    """The anchor of a class's method in the reference."""
    return f'id="{defined_in.__module__}.{defined_in.__qualname__}.{name}"'


def test_llms_txt_links_every_page_and_no_other_file() -> None:
    """The form: https://llmstxt.org."""
    text = (REPOSITORY / "llms.txt").read_text(encoding="utf-8")
    assert re.match(r"# \S+\n\n> ", text)
    links = re.findall(r"^- \[[^]]+\]\(([^)]+)\): \S", text, re.MULTILINE)
    assert links == [*dict.fromkeys(links)] and all((REPOSITORY / link).is_file() for link in links), links
    assert {page for page in PAGES if page != "docs/index.md"} <= set(links)


def test_the_links_of_every_page_lead_to_files() -> None:
    for page in (*PAGES, "README.md", "CONTRIBUTING.md"):
        folder = (REPOSITORY / page).parent
        for link in re.findall(r"\]\(([^)#\s]+)[^)\s]*\)", (REPOSITORY / page).read_text(encoding="utf-8")):
            assert "://" in link or (folder / link).exists(), f"{page}: {link}"


def test_pages_and_their_paragraphs_are_short_and_their_blocks_are_known() -> None:
    for page in PAGES:
        text = (REPOSITORY / page).read_text(encoding="utf-8")
        assert page == "docs/reference/families.md" or len(text.splitlines()) <= 150, page
        for paragraph in re.split(r"\n\s*\n", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
            for piece in re.split(r"\n(?=- |\||: |\d\. )", paragraph):
                assert piece.strip().count("\n") < 6, f"{page}: {piece}"
        for block in blocks(REPOSITORY / page):
            assert block.language != "bash" or block.word in ("", ELSEWHERE), f"{page}: {block.word}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.exhaustive if page in LONG else ()) for page in WITH_COMMANDS]
)
def test_commands_of(page: str, tmp_path: Path, corpus: Path, cache: Path) -> None:
    shutil.copytree(corpus, tmp_path / "corpus" / "part")
    rows = (json.dumps({"text": f"document number {n}, of a few words"}) for n in range(300))
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows))
    if page in ("docs/guides/images.md", "docs/guides/vision_language.md", "docs/guides/parameter_groups.md"):
        need_digits()
    if page in ("docs/guides/images.md", "docs/guides/vision_language.md", "docs/guides/videos.md"):
        folder_of_classes(tmp_path / "pets")
    if page == "docs/guides/recordings.md":
        (tmp_path / "sounds").mkdir()
        for name in ("ab", "ba"):
            write_wav(tmp_path / "sounds" / f"{name}.wav", tones(name, 0))
    if page == "docs/guides/speech.md":
        need_speech("espeak-ng")
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples")
    known = environment(cache)
    known["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "site"), known["PYTHONPATH"]])
    with hub_of(page, tmp_path / "hub") as hub:
        try_commands(page, tmp_path, {**known, **hub})


@contextmanager
def hub_of(page: str, folder: Path) -> Iterator[dict[str, str]]:
    """What points to a Hub of the tests' own, with the repositories that the page names."""
    if page != "docs/guides/hub.md":
        yield {}
        return
    from mgpu_pipe.models.build import build_meta, materialise
    from tests.inference.support import write_tokenizer
    from tests.models.tiny import tiny_model, write_folder

    source = tiny_model("llama", vocab_size=304, bos_token_id=None)
    write_folder(materialise(build_meta(source), 5, "cpu"), folder)
    with local_hub() as hub:
        hub.model("HuggingFaceTB/SmolLM2-135M").commit(files_of(write_tokenizer(folder)))
        stories = "\n".join(f"Once upon a time there were {count} foxes." for count in range(2000)).encode()
        names = ("TinyStories-valid.txt", "TinyStories-train.txt")
        hub.dataset("roneneldan/TinyStories").commit(dict.fromkeys(names, stories))
        yield hub.environment(folder / "cache", TOKEN)


def try_commands(page: str, tmp_path: Path, known: Mapping[str, str]) -> None:
    for block in blocks(REPOSITORY / page):
        if block.is_file:
            (tmp_path / block.word).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.word).write_text(block.text)
        for command in block.commands:
            if command.startswith("make "):  # tests/test_readme.py
                continue
            if block.word == ELSEWHERE:
                words = ["check", *overrides(command)]
                done = run_program([*words, "checkpoint.resume=none"], tmp_path, known, 60)
            else:
                done = run(command, tmp_path, known)
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        for command, shown in block.shown:
            done = run(command, tmp_path, known)
            assert (done.returncode, done.stderr) == (2, shown), command


def test_the_messages_that_troubleshooting_quotes_are_those_of_the_program() -> None:
    page = (REPOSITORY / "docs" / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    terms = re.findall(r"^(`.*)\n: ", page, re.MULTILINE)
    quoted = [message for term in terms for message in re.findall(r"`([^`]+)`", term)]
    assert len(quoted) > 10
    program = "".join(file.read_text(encoding="utf-8") for file in (REPOSITORY / "mgpu_pipe").rglob("*.py"))
    program = re.sub(r'"\n\s*f?"', "", program)
    for message in quoted:
        for piece in re.split(r"\.\.\.|\b[NP]\b", message):
            assert piece.strip() in program, message
