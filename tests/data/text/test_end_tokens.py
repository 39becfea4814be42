"""The token that ends a text, in folders of the shapes that published models have: asked, and never guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from mgpu_pipe.data.text.tokenizer import resolve_tokenizer
from mgpu_pipe.errors import ConfigError
from tests.data.support import config

WORDS = ["<unk>", "a", "b", "[CLS]", "[SEP]", "[EOS]", "</s>", "<s>", "<|endoftext|>", "<|im_end|>"]


def write_folder(
    folder: Path, special: list[str], template: str = "", settings: dict[str, Any] | None = None, **model: Any
) -> Path:
    """A model's folder without weights, whose tokenizer has ``special`` tokens.

    Args:
        template: what is written around a text.
        settings: tokenizer_config.json; None leaves it out.
        model: config.json.
    """
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.add_special_tokens(special)
    if template:
        named = [(word, WORDS.index(word)) for word in template.split() if word != "$A"]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 16, **model}))
    return folder


SHAPES = {
    "clip": (["<|endoftext|>", "</s>"], "<s> $A <|endoftext|>", None, {"text_config": {"eos_token_id": 2}}),
    "bert": (["[CLS]", "[SEP]", "[EOS]"], "[CLS] $A [SEP]", {"tokenizer_class": "BertTokenizer"}, {}),
    "bert, named": (["[CLS]", "[SEP]"], "", {"sep_token": "[SEP]", "cls_token": "[CLS]", "eos_token": None}, {}),
    "gpt2": (["<|endoftext|>"], "", {"pad_token": None, "eos_token": None}, {"eos_token_id": 8}),
    "opt": (["<|endoftext|>", "</s>"], "<s> $A", None, {"eos_token_id": 6}),
    "llama": (["<s>", "</s>"], "<s> $A", {"eos_token": {"content": "</s>", "lstrip": False}}, {"eos_token_id": 2}),
    "llama, several": (["<|endoftext|>", "</s>", "<|im_end|>"], "<s> $A", {}, {"eos_token_id": [99, 9, 6]}),
    "t5": (["<|endoftext|>", "</s>"], "$A </s>", {"extra_special_tokens": ["<|endoftext|>"]}, {"eos_token_id": 1}),
}
ENDS = {
    "clip": "<|endoftext|>", "bert": "[SEP]", "bert, named": "[SEP]", "gpt2": "<|endoftext|>", "opt": "</s>",
    "llama": "</s>", "llama, several": "<|im_end|>", "t5": "</s>",
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_a_folder_says_what_ends_a_text(tmp_path: Path, shape: str):
    special, template, settings, model = SHAPES[shape]
    folder = write_folder(tmp_path / "model", special, template, settings, **model)
    run = config(tmp_path)
    run.model.path, run.model.config = str(folder), {}
    known = resolve_tokenizer(run.model, run.data, run.objective, [], tmp_path / "cache")
    assert known.eos_token_id == WORDS.index(ENDS[shape])
    kept = json.loads((known.folder / "tokenizer_config.json").read_text())
    assert kept["eos_token"] in (ENDS[shape], {"content": ENDS[shape], "lstrip": False})


@pytest.mark.parametrize(
    ("special", "model", "said"),
    [
        (
            ["<|endoftext|>", "<|im_end|>"],
            {},
            "names no eos_token, and <|endoftext|> and <|im_end|> may each end a text",
        ),
        (["[CLS]"], {"eos_token_id": 1}, "and </s> and <|endoftext|> and <|im_end|> and [EOS] and [SEP] may"),
    ],
)
def test_what_no_folder_says_is_refused(tmp_path: Path, special: list[str], model: dict[str, Any], said: str):
    folder = write_folder(tmp_path / "model", special, "", {}, **model)
    run = config(tmp_path)
    run.model.path, run.model.config = str(folder), {}
    with pytest.raises(ConfigError) as refused:
        resolve_tokenizer(run.model, run.data, run.objective, [], tmp_path / "cache")
    assert said in str(refused.value)
