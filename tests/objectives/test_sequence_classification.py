"""Sequence classification. Oracle: transformers' own model, one sample at a time, in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mgpu_pipe.checks.check_model import check_attention
from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.sequence_classification import SequenceClassificationObjective
from tests.models.tiny import tiny_model
from tests.objectives.harness import check_evaluated, exported_model
from tests.support import small_runs
from tests.support.command import environment, run_folder
from tests.support.program import run_program
from tests.support.sampling import one_in

CLASSES = ("objective=sequence_classification", "logger=none", "trainer.progress=off")
BERT = (*CLASSES, "model=bert_tiny", "model.config.num_labels=3")
LLAMA = (*CLASSES, "model=llama_tiny", "model.config.num_labels=3", "model.config.pad_token_id=0")
TARGET = "bert.encoder.layer.1.output.dense"


@pytest.mark.parametrize("family", ["t5", "xlnet"])
def test_a_family_that_reads_more_than_padded_rows_is_refused(family: str) -> None:
    config = replace(compose([*BERT])[0], model=ModelConfig(type=family))
    with pytest.raises(ConfigError, match=f"model.type={family}: a padded row of tokens is not what its classifier"):
        check_attention(config.model, config.data, config.objective)


OTHERS = ["the", "a", "of", "in", "on", "at", "by", "to"]
WORDS = {"animal": "cat dog cow hen", "plant": "oak elm fir yew", "stone": "jade onyx opal ruby"}


def write_rows(file: Path, rows: int = 60, pairs: bool = False, numbers: bool = False) -> Path:
    """Texts of words of their class among others; of pairs, the class is that of the second text."""
    random = np.random.default_rng(1)
    names = list(WORDS)
    with open(file, "w", encoding="utf-8") as out:
        for row in range(rows):
            label = names[int(random.integers(3))]
            words = [*random.choice(OTHERS, 4), *random.choice(WORDS[label].split(), 3)]
            text = f"{row} {' '.join(random.permutation(words))}"
            shown = {"text": "who is it", "other": text} if pairs else {"text": text}
            out.write(json.dumps({**shown, "label": names.index(label) if numbers else label}) + "\n")
    return file


def small_data(folder: Path, *overrides: str, model: tuple[str, ...] = BERT[:-1]) -> RunConfig:
    file = folder / "rows.jsonl"
    if not file.exists():
        write_rows(file)
    shape = ("data.seq_len=24", "data.global_batch_size=8", "data.validation_fraction=0.2", "trainer.max_steps=4")
    paths = (f"data.paths=[{file}]", f"data.cache_dir={folder / 'cache'}")
    return compose([*model, "data=labelled_jsonl", *shape, *paths, *overrides])[0]


@pytest.mark.slow
def test_classes_are_found_or_given_and_the_model_names_them(tmp_path: Path) -> None:
    config = small_data(tmp_path)
    found = prepare(config)
    assert read_prepared(json.loads(json.dumps(found.as_dict()))) == found
    assert found.model_fields()["label2id"] == {"animal": 0, "plant": 1, "stone": 2}
    given = prepare(small_data(tmp_path, "data.classes=[stone,animal,plant,none]"))
    assert given.digest != found.digest
    before, after = (one.open(config, "train") for one in (found, given))
    indices = np.arange(len(before))
    moved = np.array([1, 2, 0])[before.batch(indices, indices)["labels"].numpy()]
    assert after.batch(indices, indices)["labels"].tolist() == moved.tolist()
    assert len(before) + len(found.open(config, "validation")) == 60
    held, labels = found.open(config, "validation"), before.batch(indices, indices)["labels"]
    usual = held.batch(np.arange(12), np.arange(12))["labels"] == labels.bincount().argmax()
    assert found.as_dict()["majority_accuracy"] == pytest.approx(float(usual.double().mean()))
    with pytest.raises(BadInputError, match=r"data\.classes=stone,plant: the data also has a class 'animal'"):
        prepare(small_data(tmp_path, "data.classes=[stone,plant]"))
    with pytest.raises(BadInputError, match=r"model\.config\.num_labels=5: the data has 3 classes"):
        prepare(small_data(tmp_path, "model.config.num_labels=5"))
    write_rows(tmp_path / "rows.jsonl", numbers=True)
    numbered = prepare(small_data(tmp_path, "data.classes=[animal,plant,stone]"))
    assert (numbered.open(config, "train").batch(indices, indices)["labels"] < 3).all()
    assert prepare(small_data(tmp_path)).model_fields()["id2label"] == {"0": "0", "1": "1", "2": "2"}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"text": "a"}, "has no column 'label'; set data.label_column"),
        ({"text": "a", "label": 0.5}, "has 0.5 as its class, not a name or a whole number"),
        ({"text": ["a"], "label": 0}, "column 'text' holds list, not a string"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: dict[str, Any], told: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigErrors) as refused:
        preflight(small_data(tmp_path))
    assert f"rows.jsonl:1: {told}" in str(refused.value)


def bert_tokenizer(folder: Path) -> Path:
    """A folder of BERT's own kind of tokenizer, in words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "who", "is", "it", *OTHERS]
    words += [word for line in WORDS.values() for word in line.split()]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("seq_len", [8, 24])
def test_rows_are_those_of_transformers_own_tokenizer(tmp_path: Path, pairs: bool, seq_len: int) -> None:
    from transformers import AutoTokenizer

    own = bert_tokenizer(tmp_path / "tokenizer")
    write_rows(tmp_path / "rows.jsonl", pairs=pairs)
    second = ("data.second_text_column=other",) if pairs else ()
    more = (
        f"data.tokenizer={own}",
        f"data.seq_len={seq_len}",
        "model.config.pad_token_id=0",
        "data.on_too_long=truncate",
        *second,
    )
    config = small_data(tmp_path, *more, "data.validation_fraction=0")
    samples = prepare(config).open(config, "train")
    batch = samples.batch(np.arange(60), np.arange(60))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    texts = [[row[name] for row in rows] for name in (("text", "other") if pairs else ("text",))]
    named = AutoTokenizer.from_pretrained(own)
    expected = named(
        *texts,
        padding="max_length",
        truncation=True,
        max_length=seq_len,
        return_tensors="pt",
        return_token_type_ids=True,
    )
    assert torch.equal(batch["input_ids"], expected["input_ids"])
    assert torch.equal(batch["lengths"], expected["attention_mask"].sum(1))
    assert torch.equal(batch["token_type_ids"], expected["token_type_ids"])
    assert samples.padding(np.arange(60)) == int((1 - expected["attention_mask"]).sum())


@pytest.mark.parametrize("columns", [("text", "other"), ("other", "text")])
def test_a_tokenizer_without_marks_gets_ends_between_and_after_the_texts(
    tmp_path: Path, columns: tuple[str, str]
) -> None:
    write_rows(tmp_path / "rows.jsonl", pairs=True)
    named = (f"data.text_column={columns[0]}", f"data.second_text_column={columns[1]}")
    config = small_data(tmp_path, *named, "data.seq_len=12", "data.validation_fraction=0", "data.on_too_long=truncate")
    batch = prepare(config).open(config, "train").batch(np.arange(60), np.arange(60))
    for ids, kinds, length in zip(batch["input_ids"], batch["token_type_ids"], batch["lengths"], strict=True):
        assert int((ids[:length] == 0).sum()) == 2 and int(ids[length - 1]) == 0
        begin = int((ids == 0).nonzero()[0]) + 1
        assert min(begin, int(length) - begin) > 3, "the longer text is cut, not the shorter one"
        assert kinds.tolist() == [int(begin <= place < length) for place in range(12)]


run = partial(small_runs.run, small_data)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_checkpoint_goes_on_under_another_strategy_is_evaluated_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForSequenceClassification

    from mgpu_pipe.cli.main import main

    metrics = small_runs.run_moved(small_data, tmp_path, "val/accuracy")
    check_evaluated(
        tmp_path / "second",
        capsys,
        f"loss        {metrics['val/loss']:.6f} nats a sample",
        f"accuracy    {100 * metrics['val/accuracy']:.2f}%",
        "over        12 samples of 12 held-out samples",
    )
    exported = exported_model(tmp_path / "second", AutoModelForSequenceClassification, capsys)
    assert exported.config.id2label == {0: "animal", 1: "plant", 2: "stone"}
    # The exported folder is evaluated by itself, on data that lacks a class and lists the others anew.
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps(row) + "\n" for row in rows if row["label"] != "animal"))
    shape = ["data=labelled_jsonl", "data.seq_len=24", "data.validation_fraction=0.5", f"data.paths=[{few}]"]
    for folder in ("second", "out"):
        assert main(["eval", str(tmp_path / folder), *shape, "--device", "cpu"]) == 0
    assert main(["eval", str(tmp_path / "out"), "--device", "cpu"]) == 2
    shown = capsys.readouterr()
    assert "data.source=stdlib_text: objective.name=sequence_classification trains on labelled text" in shown.err
    first, _, second = shown.out.partition("weights")
    assert first.splitlines()[:2] == second.splitlines()[1:3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "strategy"),
    [
        pytest.param(1, "strategy=single", marks=pytest.mark.exhaustive),
        pytest.param(2, "strategy=fsdp", marks=pytest.mark.exhaustive),
        pytest.param(2, "strategy=tp", marks=pytest.mark.exhaustive),
        (2, "strategy=zero3"),
    ],
)
def test_a_folder_without_the_head_gets_a_new_one(tmp_path: Path, processes: int, strategy: str) -> None:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = BertForMaskedLM(BertConfig(**sizes, vocab_size=30, max_position_embeddings=32, pad_token_id=0))
    base.save_pretrained(tmp_path / "base")
    bert_tokenizer(tmp_path / "base")
    given = ("model=hf", f"model.path={tmp_path / 'base'}", "optimizer.lr=0", strategy)
    run(tmp_path / "run", processes, *given)
    run(tmp_path / "again", 1, *given, "strategy=single")
    from mgpu_pipe.inference.open import load_run

    found, alone = (dict(load_run(tmp_path / name).model.named_parameters()) for name in ("run", "again"))
    body = dict(base.named_parameters())
    for name, value in found.items():
        assert torch.equal(value, alone[name]), name
        assert name not in body or torch.equal(value, body[name]), name
    new = found.keys() - body.keys()
    assert {"classifier.weight", "classifier.bias", "bert.pooler.dense.weight", "bert.pooler.dense.bias"} == new
    assert found["classifier.weight"].shape == (3, 32) and 0.01 < float(found["classifier.weight"].std()) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("strategy", one_in(2, ["strategy=ddp", "strategy=fsdp"]))
def test_a_run_tells_the_classes_of_its_sample_texts(tmp_path: Path, cache: Path, strategy: str) -> None:
    """The program itself, and what its last checkpoint says of these texts without it."""
    from mgpu_pipe.inference.open import load_run

    write_rows(tmp_path / "rows.jsonl")
    given = [*BERT[:-1], "data=labelled_jsonl", "data.paths=[rows.jsonl]", "data.seq_len=24", "trainer.max_steps=3"]
    given += ["data.global_batch_size=8", strategy, "trainer.devices=2", "objective.sample_texts=[cat on the hen,oak]"]
    done = run_program([*given, "trainer.accelerator=cpu"], tmp_path, environment(cache), 240)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / run_folder(done.stdout)
    summary = json.loads((folder / "summary.json").read_text())
    assert {"val/loss", "val/accuracy"} <= set(summary["metrics"])
    assert "held-out accuracy" in done.stdout and summary["data"]["classes"] == ["animal", "plant", "stone"]
    loaded = load_run(folder)
    named = loaded.tokenizer()
    for sample, text in zip(summary["samples"], ["cat on the hen", "oak"], strict=True):
        ids = torch.tensor([[*named(text)["input_ids"], named.eos_token_id]])
        with torch.no_grad():
            share, number = loaded.model(input_ids=ids).logits[0].softmax(-1).max(-1)
        assert sample["text"] == f" \u2192 {loaded.model.config.id2label[int(number)]} ({100 * float(share):.0f}%)"
        assert sample["prompt"] == text and sample["text"].strip() in (folder / "report.html").read_text()


SAMPLED = ("bert", "distilbert", "roberta", "deberta-v2", "llama", "gpt2", "mixtral")
FAMILIES = """
    albert arcee big_bird biogpt bloom camembert convbert ctrl data2vec-text deberta diffllama doge electra ernie esm
    eurobert exaone4 falcon gemma gemma2 gemma3_text glm glm4 gpt-sw3 gpt_bigcode gpt_neo gpt_neox gpt_oss gte helium
    hunyuan_v1_dense hunyuan_v1_moe ibert jamba jetmoe jina_embeddings_v3 layoutlm longformer luke markuplm
    megatron-bert minimax ministral ministral3 mistral mobilebert modernbert modernbert-decoder mpnet mpt mra nemotron
    nomic_bert nystromformer olmo olmo2 olmo3 openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3
    qwen3_5_text qwen3_moe qwen3_next rembert roberta-prelayernorm roc_bert roformer seed_oss smollm3 stablelm
    starcoder2 tapas ultrabert xlm-roberta xlm-roberta-xl yoso
"""


@pytest.mark.parametrize(
    "family", [*SAMPLED, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in FAMILIES.split())]
)
def test_padded_rows_are_those_of_a_sample_alone(family: str) -> None:
    """In every family that the objective lets pass and whose tiny model can be made."""
    made = build_meta(tiny_model(family, num_labels=3, pad_token_id=0), "AutoModelForSequenceClassification")
    model = materialise(made, 1, "cpu").eval()
    objective = SequenceClassificationObjective(model, None, lambda step: 1.0)
    batch = objective.random_batch(3, 0, 6, 24, packed=False)
    with torch.no_grad():
        together = float(objective.micro_batch_loss(batch))
        alone = float(objective.reference_loss(model, model, batch).loss_sum)
    assert together == pytest.approx(alone, rel=1e-5)
