"""``mgpu-pipe init``: writes a small project with experiments, a data source and a README."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.arguments import VerbParser, parse
from mgpu_pipe.errors import EXIT_OK, BadInputError, print_line
from mgpu_pipe.system.local_files import exists, expand_home, is_folder

NAME = r"[a-z][a-z0-9_]*"
"""Allowed folder name, which is also the name of the project's Python package."""

README = """\
# PROJECT

```bash
mgpu-pipe experiment=first                  # trains; needs nothing but this folder
mgpu-pipe check experiment=first            # prints what it would do
mgpu-pipe ls experiment                     # this folder's experiments stand next to the shipped ones
```

The options in `conf/` are this project's own: `conf/experiment/first.yaml` is `experiment=first`. They come after the
shipped ones and need names of their own. Run `mgpu-pipe` in this folder: it looks for `conf/` there.

`PROJECT/data.py` is a data source, with its own key in `PROJECT/keys.py`. Installed, it is there in every folder:

```bash
pip install --editable .
mgpu-pipe experiment=sums data.largest=30
mgpu-pipe ls data                           # lists it, and data.largest
```
"""
FIRST = """\
# @package _global_
# mgpu-pipe experiment=first
#
# A tiny Llama reads the text of Python's own standard library for a minute.
defaults:
  - override /model: llama_tiny

run:
  name: first

data:
  seq_len: 128
  global_batch_size: 16

optimizer:
  lr: 2e-3

scheduler:
  warmup_steps: 10

trainer:
  max_steps: 100
  val_every_n_steps: 50
"""
SUMS_EXPERIMENT = """\
# @package _global_
# mgpu-pipe experiment=sums
#
# A tiny Llama learns to add, from this project's own data source (pip install --editable .).
defaults:
  - override /model: llama_tiny
  - override /data: sums

run:
  name: sums

objective:
  sample_prompts: ["7 + 8 ="]
  sample_max_new_tokens: 4

optimizer:
  lr: 2e-3

trainer:
  max_steps: 200
"""
SUMS = """\
# Sums of two numbers, a line each; of this project's own source: data.largest=20.
source: sums
seq_len: 64
global_batch_size: 16
"""
DATA = '''\
"""The project's own data source: sums of two numbers."""

from __future__ import annotations

from collections.abc import Iterator

from mgpu_pipe.config.schema import RunConfig


def documents(config: RunConfig) -> Iterator[str]:
    """Every document, in the same order each time: texts here; NumPy arrays of token ids would do as well."""
    largest = config.data.largest
    for first in range(largest + 1):
        for second in range(largest + 1):
            yield f"{first} + {second} = {first + second}\\n"
'''
KEYS = '''\
"""The source's own key, for ``check``, ``ls`` and the schema. It must not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from mgpu_pipe.config.schema import DataConfig


@dataclass
class SumsConfig(DataConfig):
    largest: int = field(default=20, metadata={"at_least": 1})
    """The largest number that is added."""
'''
PYPROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "PROJECT"
version = "0.1.0"
dependencies = ["mgpu_pipe"]

[project.entry-points."mgpu_pipe.data"]
sums = "PROJECT.data:documents"

[project.entry-points."mgpu_pipe.data_keys"]
sums = "PROJECT.keys:SumsConfig"

[tool.setuptools]
packages = ["PROJECT"]
"""
FILES = {
    "README.md": README,
    "pyproject.toml": PYPROJECT,
    ".gitignore": "outputs/\n*.egg-info/\n__pycache__/\n",
    "conf/experiment/first.yaml": FIRST,
    "conf/experiment/sums.yaml": SUMS_EXPERIMENT,
    "conf/data/sums.yaml": SUMS,
    "PROJECT/__init__.py": '"""What PROJECT brings to mgpu-pipe."""\n',
    "PROJECT/data.py": DATA,
    "PROJECT/keys.py": KEYS,
}


def init(words: list[str]) -> int:
    """``mgpu-pipe init FOLDER``: write the project into a new or empty folder.

    Raises:
        BadInputError: the folder is not empty, its name is no package name, or it cannot be written.
    """
    parser = VerbParser(prog="mgpu-pipe init", description="Write a small project of your own that runs at once.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new or empty one, such as my_project")
    arguments = parse(parser, words)
    if arguments is None:
        return EXIT_OK
    folder = expand_home(arguments.folder)
    name = folder.absolute().name
    if re.fullmatch(NAME, name) is None:
        fix = "use small letters, digits and _, as in my_project: its Python package has that name too"
        raise BadInputError(f"mgpu-pipe init {arguments.folder}: {fix}")
    try:
        if exists(folder) and (not is_folder(folder) or any(folder.iterdir())):
            raise BadInputError(f"mgpu-pipe init {arguments.folder}: the folder is not empty; give a new one")
        _write(folder, name)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise BadInputError(f"mgpu-pipe init {arguments.folder}: cannot be written ({why})") from error
    print_line(f"wrote {arguments.folder}/ ({', '.join(FILES).replace('PROJECT', name)})")
    print_line(f"next: cd {arguments.folder} && mgpu-pipe experiment=first")
    return EXIT_OK


def _write(folder: Path, name: str) -> None:
    """Write all files, or none."""
    existed = exists(folder)
    try:
        for path, text in FILES.items():
            file = folder / path.replace("PROJECT", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("PROJECT", name), encoding="utf-8")
    except OSError:
        for entry in folder.iterdir() if is_folder(folder) else ():
            shutil.rmtree(entry) if is_folder(entry) else entry.unlink()
        if is_folder(folder) and not existed:
            folder.rmdir()
        raise


VERB = Verb("write a small project of your own that runs at once", init)
