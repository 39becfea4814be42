"""Names on the Hub: which texts are some, and which files a glob means."""

from __future__ import annotations

import glob
import os
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_pipe.config.hub import _as_regex, data_name, hub_name, hub_names, is_at_commit, with_names, without_revisions
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.run_identity import mathematics_hash
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "repository", "revision"),
    [
        ("org/name", "org/name", None),
        ("org/na.me-1_b@v1.0", "org/na.me-1_b", "v1.0"),
        ("org/name@refs/pr/3", "org/name", "refs/pr/3"),
        (f"org/name@{COMMIT}", "org/name", COMMIT),
    ],
)
def test_a_name_of_a_model(text: str, repository: str, revision: str | None) -> None:
    name = hub_name(text)
    assert name is not None and (name.repository, name.revision, str(name)) == (repository, revision, text)
    assert is_at_commit(text) == (revision == COMMIT)


@pytest.mark.parametrize(
    "text",
    ["", "auto", "gpt2", "a/b/c", "./org/name", "../name", "~/name", "/org/name", "folder/tokenizer.json", "a/b c"],
)
def test_a_path_is_no_name(text: str) -> None:
    assert hub_name(text) is None and not is_at_commit(text)


def test_a_folder_here_is_no_name_unless_a_revision_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/name") is None
    assert hub_name("org/name@main") is not None


def test_a_name_of_data() -> None:
    name = data_name("hf://datasets/org/name@v1/data/**/*.txt")
    assert name is not None and (name.repository, name.revision, name.files) == ("org/name", "v1", "data/**/*.txt")
    assert data_name("corpus/*.txt") is None
    for wrong in ("hf://org/name/file", "hf://datasets/name/file", "hf://datasets/org/name"):
        with pytest.raises(ConfigError, match="write it as hf://datasets/<org>/<name>"):
            data_name(wrong)


def test_names_are_found_by_key_replaced_and_compared_without_their_revisions() -> None:
    def config_of(revision: str) -> RunConfig:
        data = [f"hf://datasets/org/texts{revision}/*.txt", "local/*.txt"]
        words = [
            "model=hf",
            f"model.path=org/name{revision}",
            "data=text_files",
            f"data.paths={data}".replace("'", '"'),
        ]
        return compose([*words, f"data.tokenizer=org/words{revision}"])[0]

    config, other = config_of("@main"), config_of(f"@{COMMIT}")
    assert [key for key, _ in hub_names(config.model, config.data)] == ["model.path", "data.tokenizer", "data.paths"]
    plain = without_revisions(config.model, config.data)
    assert plain == without_revisions(other.model, other.data) != {"model": config.model, "data": config.data}
    exact = {str(name): str(replace(name, revision=COMMIT)) for _, name in hub_names(config.model, config.data)}
    assert replace(config, **with_names(config.model, config.data, exact)) == other
    assert mathematics_hash(config) != mathematics_hash(other), "a commit is part of a run's mathematics"


@pytest.mark.parametrize(
    "pattern",
    ["*.txt", "data/*", "data/*.txt", "**/*.txt", "data/**/*.txt", "data/?.txt", "data/[ab].txt", "data/[!a].txt",
     "data/a.txt", "*", "**/*", "data/.*", "x+y.txt"],
)  # fmt: skip
def test_a_glob_means_what_it_means_in_a_folder(tmp_path: Path, pattern: str) -> None:
    names = ["a.txt", "x+y.txt", "xxy.txt", ".hidden.txt", "data/a.txt", "data/b.txt", "data/ab.txt", "data/.c.txt",
             "data/deep/a.txt", "data/deep/er/a.txt", "data/.d/a.txt", "other/a.csv"]  # fmt: skip
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    there = {
        os.path.relpath(path, tmp_path)
        for path in glob.glob(str(tmp_path / pattern), recursive=True)
        if os.path.isfile(path)
    }
    assert {name for name in names if _as_regex(pattern).fullmatch(name)} == there
