from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mgpu_pipe.models.build import build_meta, materialise
from tests.hub.support import Place
from tests.inference.support import write_texts, write_tokenizer
from tests.models.tiny import tiny_model, write_folder
from tests.support.hub import files_of, local_hub


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    source = tiny_model("llama", vocab_size=304, bos_token_id=None)
    write_folder(materialise(build_meta(source), 5, "cpu"), folder)
    return write_tokenizer(folder)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"), 24)


@pytest.fixture
def place(cache: Path, tmp_path: Path, model: Path, texts: Path) -> Iterator[Place]:
    with local_hub() as hub:
        hub.model("acme/tiny").commit({**files_of(model), "pytorch_model.bin": b"a pickle", "onnx/model.onnx": b"x"})
        hub.dataset("acme/texts").commit({f"data/{name}": text for name, text in files_of(texts).items()})
        yield Place(hub, tmp_path, cache)
