"""``data=git_files``: exactly the text files that ``git ls-files`` names. Oracle: git itself, and the files written."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mgpu_pipe.data.data_source import check_sources, open_source
from mgpu_pipe.data.sources.mixture import MixtureConfig, MixtureSource
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors
from tests.data.support import config

FILES = {
    "README.md": b"# A repository\n",
    "src/app/[id].py": b"print('brackets')\n",
    "src/main.py": b"print('main')\n",
    "src/deep/name with space.py": "print('\u00e9')\n".encode(),
}
LEFT_OUT = {"src/__init__.py": b"", "logo.bin": b"\x89PNG\0\1", "old.gz": b"\x1f\x8b\x08\x08text"}


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    for name, content in {**FILES, **LEFT_OUT}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "link.py").symlink_to("src/main.py")
    (root / ".gitignore").write_bytes(b"build/\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    (root / "build").mkdir()
    (root / "build" / "out.py").write_text("ignored\n")
    (root / "untracked.py").write_text("untracked\n")
    return root


def texts(tmp_path: Path, *paths: object) -> dict[str, str]:
    run = config(tmp_path, source="git_files", paths=[str(path) for path in paths])
    check_sources(run.model, run.data)
    documents = list(open_source(run, tmp_path / "cache").documents())
    return {os.path.relpath(document.origin, tmp_path / "repository"): document.text for document in documents}


def test_the_tracked_text_files_are_documents_in_the_order_of_their_paths(repository: Path, tmp_path: Path) -> None:
    expected = {name: content.decode() for name, content in sorted({**FILES, ".gitignore": b"build/\n"}.items())}
    assert list(texts(tmp_path, repository).items()) == list(expected.items())


def test_a_folder_or_a_glob_inside_a_repository_names_a_part(repository: Path, tmp_path: Path) -> None:
    python = {name: content.decode() for name, content in FILES.items() if name.endswith(".py")}
    assert texts(tmp_path, repository / "src") == python
    assert texts(tmp_path, repository / "**" / "*.py") == python
    assert list(texts(tmp_path, repository / "src" / "main.py", repository / "src")) == [
        *("src/main.py", "src/app/[id].py", "src/deep/name with space.py")
    ]


def test_the_identity_is_of_the_content_and_not_of_what_git_leaves_out(repository: Path, tmp_path: Path) -> None:
    run = config(tmp_path, source="git_files", paths=[str(repository)])

    def identity() -> str:
        return open_source(run, tmp_path / "cache").identity

    first = identity()
    (repository / "untracked.py").write_text("changed\n")
    git(repository, "commit", "-qm", "all")
    assert identity() == first
    (repository / "src" / "main.py").write_text("print('other')\n")
    assert identity() != first


def test_a_file_that_is_no_utf8_stops_or_is_left_out(repository: Path, tmp_path: Path) -> None:
    (repository / "latin.txt").write_bytes(b"caf\xe9\n")
    git(repository, "add", "latin.txt")
    run = config(tmp_path, source="git_files", paths=[str(repository)])
    with pytest.raises(ConfigErrors, match=r"latin\.txt.*data\.on_bad_sample=skip"):
        check_sources(run.model, run.data)
    run.data.on_bad_sample = "skip"
    check_sources(run.model, run.data)
    faults = [document.origin for document in open_source(run, tmp_path / "cache").documents() if document.fault]
    assert faults == [str(repository / "latin.txt")]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("{root}/untracked.py", "names no tracked file; track them by git add"),
        ("{root}/src/absent", "matches no file"),
        ("{root}/logo.bin", "all 1 tracked files are binary or empty"),
        ("{outside}", "not a git repository"),
        ("hf://datasets/a/b/*.py", "is no folder here; clone it"),
    ],
)
def test_what_is_no_part_of_a_repository_is_refused(repository: Path, tmp_path: Path, path: str, problem: str) -> None:
    (tmp_path / "outside").mkdir()
    run = config(tmp_path, source="git_files", paths=[path.format(root=repository, outside=tmp_path / "outside")])
    for refused in (lambda: check_sources(run.model, run.data), lambda: open_source(run, tmp_path / "cache")):
        with pytest.raises(BadInputError, match=problem) as error:
            refused()
        assert "\n" not in str(error.value)


def test_another_repository_of_the_environment_is_not_read(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert "src/main.py" in texts(tmp_path, repository)


def test_without_git_it_says_so(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="git is not installed; install git"):
        open_source(config(tmp_path, source="git_files", paths=[str(repository)]), tmp_path / "cache")


def test_a_mixture_takes_it_beside_text(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text\n" * 40)
    run = config(tmp_path)
    code = MixtureSource(source="git_files", paths=[str(repository)])
    text = MixtureSource(source="text_files", paths=[str(tmp_path / "text.txt")])
    run.data = MixtureConfig(source="mixture", sources={"code": code, "text": text})
    check_sources(run.model, run.data)


def test_a_folder_that_became_a_link_is_not_followed(repository: Path, tmp_path: Path) -> None:
    (repository / "src").rename(tmp_path / "outside")
    (repository / "src").symlink_to(tmp_path / "outside")
    assert set(texts(tmp_path, repository)) == {".gitignore", "README.md"}
    (tmp_path / "linked").symlink_to(repository)
    assert len(texts(tmp_path, tmp_path / "linked")) == 2, "the path of the user may be a link"


def test_programs_that_a_repository_names_do_not_run(repository: Path, tmp_path: Path) -> None:
    """A sparse index lists a folder by its tree object; where that is missing, git fetches it by such a program."""
    git(repository, "commit", "-qm", "a")
    tree = subprocess.run(
        ["git", "-C", str(repository), "rev-parse", "HEAD:src"], check=True, capture_output=True, text=True
    ).stdout.strip()
    git(repository, "sparse-checkout", "init", "--cone", "--sparse-index")
    (repository / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    program = tmp_path / "program.sh"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o700)
    git(repository, "config", "core.repositoryformatversion", "1")
    git(repository, "config", "extensions.partialClone", "origin")
    git(repository, "config", "remote.origin.promisor", "true")
    git(repository, "config", "remote.origin.url", str(tmp_path / "nowhere"))
    git(repository, "config", "remote.origin.uploadpack", str(program))
    assert set(texts(tmp_path, repository)) == {".gitignore", "README.md"}
    assert not (tmp_path / "ran").exists()
