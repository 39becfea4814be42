"""Masked language modelling. Oracle: transformers' own BERT, one document at a time, in one process."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.samples import evaluation_numbers
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.errors import ConfigErrors
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.kernels.packed_attention import use_packed_attention
from mgpu_pipe.objectives.losses.chunked_head import ChunkedHead
from mgpu_pipe.objectives.losses.cross_entropy import correct_predictions
from mgpu_pipe.objectives.masked_lm import MaskedLMObjective
from mgpu_pipe.objectives.text_keys import MaskedLMConfig
from tests.objectives.harness import check_evaluated, exported_model
from tests.support import small_runs

BERT = ("objective=masked_lm", "model=bert_tiny", "logger=none", "trainer.progress=off")
TARGET = "bert.encoder.layer.1.output.dense"


def small_data(folder: Path, *overrides: str) -> RunConfig:
    shape = ("data=synthetic", "data.seq_len=32", "data.global_batch_size=8", "data.validation_max_samples=16")
    return compose([*BERT, *shape, f"data.cache_dir={folder / 'cache'}", "trainer.max_steps=4", *overrides])[0]


def test_hidden_tokens_depend_on_the_seed_and_the_samples_number_alone(tmp_path: Path) -> None:
    config = small_data(tmp_path)
    prepared = prepare(config)
    text = prepared.open(config, "train")
    samples = MaskedLMObjective.samples(config, text)
    indices, numbers = np.array([5, 2, 9]), np.array([17, 3, 40])
    together = samples.batch(indices, numbers)
    plain = text.batch(indices, numbers)["input_ids"]
    for row in range(3):
        alone = samples.batch(indices[row : row + 1], numbers[row : row + 1])
        assert all(torch.equal(alone[name][0], together[name][row]) for name in together)
    labels = together["labels"]
    hidden = labels != IGNORE_INDEX
    assert torch.equal(labels[hidden], plain[hidden])
    assert torch.equal(together["input_ids"][~hidden], plain[~hidden])
    assert int(hidden.sum()) == samples.valid_units(indices, numbers) > 0
    next_epoch = samples.batch(indices, numbers + 1000)
    assert not torch.equal(next_epoch["labels"], labels)
    held_out = np.array([0, 1, 2, 3])
    evaluated = MaskedLMObjective.samples(config, prepared.open(config, "validation"))
    shown = evaluated.batch(held_out, evaluation_numbers(held_out))["labels"] != IGNORE_INDEX
    assert len({tuple(row.tolist()) for row in shown}) > 1, "each held-out sample has tokens of its own hidden"
    many = samples.batch(np.arange(200), np.arange(200))
    was_hidden = many["labels"] != IGNORE_INDEX
    share = float((many["input_ids"][was_hidden] == 1023).double().mean())
    assert 0.72 < share < 0.88, "four in five are behind the mask token"


def test_correct_predictions_are_those_of_whole_logits() -> None:
    hidden, weight, bias = torch.randn(3, 7, 8), torch.randn(20, 8), torch.randn(20)
    labels = F.linear(hidden, weight, bias).argmax(-1)
    labels[0, :3], labels[1] = IGNORE_INDEX, (labels[1] + 1) % 20
    right = correct_predictions(ChunkedHead(hidden, weight, bias, labels, 4))
    expected = torch.ones(3, 7, dtype=torch.bool)
    expected[0, :3], expected[1] = False, False
    assert torch.equal(right, expected)


def tokenizer_with(folder: Path, mask: str | None) -> Path:
    """A tokenizer folder of 600 words whose mask token, where it has one, stands among them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [mask if number == 103 and mask else f"w{number}" for number in range(600)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", mask_token=mask)
    fast.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("source", ["jsonl", "mixture"])
@pytest.mark.parametrize(("mask", "token"), [("[MASK]", 103), ("<mask>", 103), (None, 1023)])
def test_the_mask_token_is_the_tokenizers(tmp_path: Path, mask: str | None, token: int, source: str) -> None:
    texts = tmp_path / "texts.jsonl"
    rows = [{"text": " ".join(f"w{2 + (row * word) % 90}" for word in range(60))} for row in range(40)]
    texts.write_text("\n".join(map(json.dumps, rows)) + "\n")
    tokenizer = tokenizer_with(tmp_path / "tokenizer", mask)
    paths = f"data.paths=[{texts}]" if source == "jsonl" else f"data.sources={{lines: {{paths: [{texts}]}}}}"
    given = (f"data={source}", paths, f"data.tokenizer={tokenizer}", "data.validation_fraction=0")
    config = small_data(tmp_path, *given)
    prepared = prepare(config)
    samples = MaskedLMObjective.samples(prepared.complete(config), prepared.open(config, "train"))
    batch = samples.batch(np.arange(16), np.arange(16))
    hidden = batch["input_ids"][batch["labels"] != IGNORE_INDEX]
    assert 0.6 < float((hidden == token).double().mean()) < 0.95


def test_a_pretrained_model_whose_tokenizer_has_no_mask_token_is_refused(tmp_path: Path) -> None:
    folder = tokenizer_with(tmp_path / "hf", None)
    model = materialise(build_meta(small_data(tmp_path).model, "AutoModelForMaskedLM"), 1, "cpu")
    model.save_pretrained(folder)
    given = ("model=hf", f"model.path={folder}", "model.type=null", "data=jsonl", f"data.paths=[{folder}/config.json]")
    with pytest.raises(ConfigErrors, match=r"objective\.mask_token_id=auto: .* has no mask token; give the id"):
        preflight(compose([*BERT, *given])[0])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_checkpoint_goes_on_under_another_strategy_is_evaluated_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForMaskedLM

    from mgpu_pipe.cli.main import main

    metrics = small_runs.run_moved(small_data, tmp_path, "val/accuracy")
    check_evaluated(
        tmp_path / "second",
        capsys,
        f"loss        {metrics['val/loss']:.6f} nats a token",
        f"accuracy    {100 * metrics['val/accuracy']:.2f}%",
    )
    assert main(["generate", str(tmp_path / "second"), "--prompt", "1"]) == 2
    assert "BertForMaskedLM does not generate text" in capsys.readouterr().err
    exported = exported_model(tmp_path / "second", AutoModelForMaskedLM, capsys)
    assert type(exported).__name__ == "BertForMaskedLM"


SMALL = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"vocab_size": 101, "max_position_embeddings": 80, "hidden_dropout_prob": 0.0},
    **{"attention_probs_dropout_prob": 0.0},
}


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_a_step_is_that_with_the_mask(family: str) -> None:
    plain = materialise(build_meta(ModelConfig(type=family, config=SMALL), "AutoModelForMaskedLM"), 3, "cpu")
    by_starts = copy.deepcopy(plain)
    assert use_packed_attention(by_starts)
    found = []
    for model in (plain, by_starts):
        objective = MaskedLMObjective(model, None, lambda _: 1.0, MaskedLMConfig(mask_token_id=4))
        batch = objective.random_batch(1, 0, 4, 48, True)
        loss = objective.micro_batch_loss({**batch, **objective.host_inputs(batch)})
        loss.backward()
        found.append((loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (loss, gradients), (other, others) = found
    torch.testing.assert_close(other, loss, rtol=1e-6, atol=0)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-5)


def test_windows_to_both_sides_are_left_to_the_mask() -> None:
    fields = {**SMALL, "num_hidden_layers": 3, "attention_dropout": 0.0}
    del fields["hidden_dropout_prob"], fields["attention_probs_dropout_prob"], fields["vocab_size"]
    assert not use_packed_attention(build_meta(ModelConfig(type="modernbert", config=fields), "AutoModelForMaskedLM"))
