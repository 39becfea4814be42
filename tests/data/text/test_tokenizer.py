"""Tokenizers: trained, imported, refused, and their end tokens. Oracle for the folders: transformers itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from mgpu_pipe.checks.check_model import check_tokenizer_size
from mgpu_pipe.cli import main as cli
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.data_source import open_source
from mgpu_pipe.data.text.document_encoder import Encoder, EncoderSpec
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.heldout_split import document_hash, held_out
from mgpu_pipe.data.text.prepare_text import prepare
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.data.text.tokenizer import resolve_tokenizer
from mgpu_pipe.data.text.tokenizer_folder import FILES, chat_of, check_tokenizer, token_differences
from mgpu_pipe.errors import BadInputError, ConfigError, ModelFolderError
from tests.data.support import CHATML, config, sentences, text_files
from tests.data.text.tokenizer_kinds import write_kind
from tests.data.text.written import EOS
from tests.support.tiny import COMMON

ODD_TEXT = "def f(x):\n\treturn  x + 1  # \u00e9\u4e2d\U0001f600 <|endoftext \r\n\n  end."


def _word_tokenizer(folder: Path, words: list[str], settings: dict[str, object] | None = None) -> Path:
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _refusal(run: RunConfig, kind: type[BadInputError], match: str) -> None:
    with pytest.raises(kind, match=match):
        prepare(run)


def test_a_trained_tokenizer_loads_in_transformers_and_gives_text_back(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    prepared = prepare(run)
    assert prepared.vocab_size == 300
    loaded = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
    assert len(loaded) == 300
    assert loaded.eos_token_id == prepared.eos_token_id == loaded.convert_tokens_to_ids("<|endoftext|>")
    ids = loaded(ODD_TEXT)["input_ids"]
    assert loaded.decode(ids) == ODD_TEXT
    assert ids == Tokenizer.from_file(str(prepared.tokenizer_folder / "tokenizer.json")).encode(ODD_TEXT).ids


def test_documents_are_their_tokens_and_the_end_of_text(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    prepared = prepare(run)
    loaded = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
    store = TokenStore.open(prepared.folder)
    texts = [document.text for document in open_source(run, tmp_path / "cache").documents()]
    assert store.num_documents == len(texts) == 20
    for number, text in enumerate(texts):
        tokens = store.tokens[store.offsets[number] : store.offsets[number + 1]].tolist()
        assert tokens == [*loaded(text)["input_ids"], prepared.eos_token_id]


def test_training_is_deterministic_and_sees_no_held_out_document(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    texts = {d.origin: d.text for d in open_source(run, tmp_path / "cache").documents()}
    held = held_out(_hashes(list(texts.values())), run.data.validation_fraction)
    first = prepare(run)
    tokenizer = (first.tokenizer_folder / "tokenizer.json").read_bytes()
    # Trained again on the documents that were not held out, and on nothing else.
    run.data.paths = [origin for origin, out in zip(texts, held, strict=True) if not out]
    run.data.cache_dir = str(tmp_path / "second cache")
    run.data.validation_fraction = 0.0
    second = prepare(run)
    assert (second.tokenizer_folder / "tokenizer.json").read_bytes() == tokenizer
    assert second.num_documents == 20 - held.sum() == first.train.documents


def _hashes(texts: list[str]) -> np.ndarray:
    return np.array([document_hash(text) for text in texts], dtype=np.uint64)


def test_a_tokenizer_folder_or_file_is_taken_as_it_is(tmp_path: Path) -> None:
    words = ["<unk>", "the", "a", "cat", "</s>"]
    end = {"__type": "AddedToken", "content": "</s>", "special": True}
    folder = _word_tokenizer(tmp_path / "words", words, {"eos_token": end, "model_max_length": 99})
    (tmp_path / "text.txt").write_text("the cat dog", encoding="utf-8")
    for chosen in (folder, folder / "tokenizer.json"):
        run = config(tmp_path, source="text_files", paths=[str(tmp_path / "text.txt")], tokenizer=str(chosen))
        prepared = prepare(run)
        assert (prepared.vocab_size, prepared.eos_token_id) == (5, 4)
        assert TokenStore.open(prepared.folder).tokens.tolist() == [1, 3, 0, 4]
        loaded = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
        assert loaded("the cat")["input_ids"] == [1, 3]
        assert loaded.eos_token_id == 4


def test_auto_takes_the_model_folders_tokenizer(tmp_path: Path) -> None:
    folder = _word_tokenizer(tmp_path / "model", ["<unk>", "the", "<eos>"])
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 10}))
    run = text_files(tmp_path)
    run.model.path, run.model.config = str(folder), {}
    assert prepare(run).vocab_size == 3
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 2}))
    _refusal(run, ModelFolderError, "its vocabulary has 2 entries, but the tokenizer has 3")
    (folder / "tokenizer.json").write_text("{")
    _refusal(run, ModelFolderError, r"tokenizer\.json: is not a tokenizer")
    (folder / "tokenizer.json").unlink()
    _refusal(run, ModelFolderError, r"the folder has no tokenizer\.json; set data\.tokenizer")


def test_added_tokens_without_a_row_are_left_out_unless_a_text_needs_them(tmp_path: Path) -> None:
    """As the image token of Gemma 3's text models, and the padding token of fine-tunings. Oracle: Python's sets."""
    folder = _word_tokenizer(tmp_path / "model", ["<unk>", "the", "<eos>"], {"pad_token": "<pad>"})
    content = json.loads((folder / "tokenizer.json").read_text())
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [
        {"id": number, "content": text, "special": True, **plain} for number, text in ((3, "<pad>"), (4, "<turn>"))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 3}))
    run = text_files(tmp_path)
    run.model.path, run.model.config = str(folder), {}
    prepared = prepare(run)
    loaded = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
    assert prepared.vocab_size == len(loaded) == 3 and loaded.pad_token is None
    check_tokenizer_size(run.model, run.data, run.objective)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}<turn>{% endfor %}")
    _refusal(run, ModelFolderError, r"the tokenizer has 5; .* or add model\.config\.vocab_size=5")
    run.model.config = {"vocab_size": 4}
    with pytest.raises(ConfigError, match=r"vocab_size=4: the tokenizer has 5 entries; use at least 5"):
        check_tokenizer_size(run.model, run.data, run.objective)
    run.model.config = {"vocab_size": 5}
    check_tokenizer_size(run.model, run.data, run.objective)
    assert prepare(run).vocab_size == 5


def test_a_tokenizer_that_cannot_work_is_refused(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    run.data.tokenizer = str(tmp_path / "absent")
    _refusal(run, ConfigError, r"data\.tokenizer=.*absent: no such file or folder")
    run.data.tokenizer = str(tmp_path)
    _refusal(run, ConfigError, r"data\.tokenizer=.*: the folder has no tokenizer\.json")
    run.data.tokenizer = str(_word_tokenizer(tmp_path / "endless", ["<unk>", "the"]))
    _refusal(run, ConfigError, "it names no eos_token; set eos_token in its tokenizer_config.json")
    run.data.tokenizer = str(_word_tokenizer(tmp_path / "wrong", ["<unk>", "</s>"], {"eos_token": "<end>"}))
    _refusal(run, ConfigError, "its eos_token <end> is not in its vocabulary")
    run.data.tokenizer = str(_word_tokenizer(tmp_path / "large", [*map(str, range(300)), "</s>"]))
    _refusal(run, ConfigError, r"model\.config\.vocab_size=300: the tokenizer has 301 entries; use at least 301")
    (tmp_path / "large" / "tokenizer.json").write_text("no json")
    _refusal(run, ConfigError, r"data\.tokenizer=.*tokenizer\.json is not a tokenizer")


def test_a_tokenizer_cannot_be_made_for_an_unknown_or_tiny_vocabulary(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    run.model.config = {}
    _refusal(run, ConfigError, r"model\.config\.vocab_size=null")
    run.model.config = {"vocab_size": 256}
    _refusal(run, ConfigError, r"model\.config\.vocab_size=256: .*; use at least 257")


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path: Path) -> None:
    words = ["</s>", *(f"w{number}" for number in range(70_000))]
    folder = _word_tokenizer(tmp_path / "words", words)
    (tmp_path / "text.txt").write_text("w69999 w1 w65535", encoding="utf-8")
    run = config(tmp_path, source="text_files", paths=[str(tmp_path / "text.txt")], tokenizer=str(folder))
    run.model.config = {"vocab_size": 70_001}
    assert TokenStore.open(prepare(run).folder).tokens.tolist() == [70_000, 2, 65_536, 0]


def test_synthetic_tokens_come_with_a_tokenizer_of_numbers(tmp_path: Path) -> None:
    run = config(tmp_path, source="synthetic")
    run.data.synthetic.num_documents, run.data.synthetic.sigma, run.data.synthetic.mean_length = 50, 0.0, 32
    prepared = prepare(run)
    loaded = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
    assert (len(loaded), loaded.eos_token_id, loaded("7 299")["input_ids"]) == (300, 0, [7, 299])
    store = TokenStore.open(prepared.folder)
    assert set(store.offsets.tolist()) == set(range(0, 51 * 32, 32))
    assert (store.tokens[31::32] == 0).all()
    assert (store.tokens == 0).sum() == 50
    assert store.tokens.max() < 300
    run.seed += 1
    assert TokenStore.open(prepare(run).folder).tokens.tolist() != store.tokens.tolist()


def test_a_chat_template_travels_with_the_tokenizer(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    (tmp_path / "chat.jinja").write_text(CHATML, encoding="utf-8")
    run.data.chat_template = str(tmp_path / "chat.jinja")
    talk = [{"role": "user", "content": sentences(1, 3)}]
    expected = f"<|im_start|>user\n{talk[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    trained = prepare(run).tokenizer_folder
    folder = _word_tokenizer(tmp_path / "words", ["<unk>", "</s>"], {"chat_template": "another"})
    run.data.tokenizer = str(folder)
    for made in (trained, prepare(run).tokenizer_folder):
        loaded = AutoTokenizer.from_pretrained(made)
        assert loaded.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) == expected


TOKENIZER, SETTINGS, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TOKEN = {
    "id": 5, "content": "<x>", "special": True, "lstrip": False, "rstrip": False, "normalized": False,
    "single_word": False,
}  # fmt: skip


def odd_files(whole: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Files' names, and what stands in each."""
    model, texts = whole["model"], list(whole["model"]["vocab"])
    for name in (TOKENIZER, SETTINGS, SPECIAL, "chat_template.json"):
        yield from ((name, value) for value in ([], 3, "x"))
    yield from ((TOKENIZER, value) for value in ({}, {"model": None}, {"model": {}}, {"added_tokens": [[]]}))
    yield from (("added_tokens.json", value) for value in ({"a": "x"}, {"a": -1}, {"a": [1]}))
    for key in ("model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "truncation"):
        yield from ((TOKENIZER, {**whole, key: value}) for value in (3, [[1]], {"type": 5}))
    for key, value in (("vocab", [1]), ("vocab", "x"), ("merges", {}), ("merges", [["a", 1]]), ("unk_token", 3),
                       ("type", []), ("type", "Odd")):  # fmt: skip
        yield TOKENIZER, {**whole, "model": {**model, key: value}}
    for value in (None, "x", 1.5, True, [1], -1, 2**32, 10**400, model["vocab"][texts[1]]):
        yield TOKENIZER, {**whole, "model": {**model, "vocab": {**model["vocab"], texts[0]: value}}}
    for key, value in (("id", -1), ("id", 2**32), ("id", "x"), ("id", None), ("content", 3), ("content", ""),
                       ("special", "x"), ("lstrip", None)):  # fmt: skip
        yield TOKENIZER, {**whole, "added_tokens": [*whole["added_tokens"], {**TOKEN, key: value}]}
    twice = [*whole["added_tokens"], TOKEN, {**TOKEN, "content": "<y>"}]
    yield TOKENIZER, {**whole, "added_tokens": twice}
    for key, value in (("eos_token", 3), ("eos_token", {"content": 3}), ("eos_token", "odd"), ("chat_template", 3),
                       ("chat_template", [{"name": "default"}]), ("chat_template", ["x"]),
                       ("added_tokens_decoder", []), ("added_tokens_decoder", {"x": TOKEN}),
                       ("added_tokens_decoder", {"5": 3}), ("extra_special_tokens", 3),
                       ("additional_special_tokens", [3]), ("model_max_length", "x"), ("tokenizer_class", 3),
                       ("padding_side", 3), ("add_bos_token", "x")):  # fmt: skip
        yield SETTINGS, {"eos_token": EOS, key: value}


def readers(model: Path, cache: Path) -> Iterator[Callable[[], object]]:
    """How verbs read a folder's tokenizer: a run, its check and data; generate, export and import."""
    run = config(cache, tokenizer=str(model))

    def prepare() -> None:
        known = resolve_tokenizer(run.model, run.data, run.objective, [], cache)
        encoder = Encoder(EncoderSpec(str(known.folder / TOKENIZER), known.eos_token_id, known.vocab_size))
        encoder.encode([Document("the house \u0416 12", "here", 1)])

    yield prepare
    yield lambda: (check_tokenizer(model), chat_of(model), token_differences(model, model))


def one_line(work: Callable[[], object], capfd: pytest.CaptureFixture[str]) -> bool:
    """Whether it refuses in one line; it writes nothing else."""
    try:
        work()
    except BadInputError as error:
        assert "\n" not in str(error), error
    else:
        return False
    assert capfd.readouterr().err == ""
    return True


def test_files_that_do_not_fit_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (model := tmp_path / "model").mkdir()
    write_kind("byte-level", model)
    kept = {name: (model / name).read_bytes() for name in FILES if (model / name).is_file()}
    cases = list(odd_files(json.loads(kept[TOKENIZER])))
    assert len(cases) >= 60
    for name, value in cases:
        for other in FILES:
            (model / other).unlink(missing_ok=True)
        for other, content in kept.items():
            (model / other).write_bytes(content)
        (model / name).write_text(json.dumps(value))
        refused = [one_line(work, capfd) for work in readers(model, tmp_path / "cache")]
        assert any(refused), (name, str(value)[-200:])


@pytest.mark.parametrize("verb", ["check", "data", "generate", "import"])
def test_verbs_refuse_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str):
    (model := tmp_path / "model").mkdir()
    write_kind("byte-level", model)
    (model / "config.json").write_text(json.dumps({"model_type": "llama", **COMMON, "vocab_size": 1000}))
    save_file({"a": np.zeros(1, np.float32)}, model / "model.safetensors")
    (tmp_path / "text.txt").write_text("the house\n" * 20)
    whole = json.loads((model / TOKENIZER).read_text())
    whole["added_tokens"].append({**TOKEN, "id": [5]})
    (model / TOKENIZER).write_text(json.dumps(whole))
    run = ["model=hf", f"model.path={model}", "data=text_files", f"data.paths=[{tmp_path / 'text.txt'}]",
           f"data.cache_dir={tmp_path / 'cache'}", "data.seq_len=16", "logger=none"]  # fmt: skip
    words = {
        "check": ["check", *run],
        "data": ["data", *run],
        "generate": ["generate", str(model), "--prompt", "the"],
        "import": ["import", "--from", str(model / "model.safetensors"), "--tokenizer", str(model),
                   "--out", str(tmp_path / "out"), *run[:2]],
    }  # fmt: skip
    assert cli.main(words[verb]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and "'added_tokens' has to be a list" in told


def test_a_word_without_a_token_is_one_line(tmp_path: Path):
    write_kind("wordpiece", tmp_path)
    whole = json.loads((tmp_path / TOKENIZER).read_text())
    whole["model"]["unk_token"] = "<nowhere>"
    (tmp_path / TOKENIZER).write_text(json.dumps(whole))
    encoder = Encoder(EncoderSpec(str(tmp_path / TOKENIZER), 2, 400))
    with pytest.raises(BadInputError, match="cannot encode a text: WordPiece error: Missing"):
        encoder.encode([Document("the house \u0416", "here", 1)])


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
