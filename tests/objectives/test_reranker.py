"""Rerankers. Oracle: sentence-transformers' losses, its evaluator of rankings, and its CrossEncoder of an export."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import DataConfig, ModelConfig, RunConfig
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.text.pair_template import adapt_to_pairs
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.build import materialise, run_model
from mgpu_pipe.objectives.reranker import RerankerObjective, ranking_sums
from mgpu_pipe.objectives.vector_keys import RERANKER, RerankerConfig, RerankerLoss
from tests.data.support import cut_batches
from tests.data.text.test_pair_template import configured, rows_of, samples_of
from tests.objectives.harness import (
    check_cuts,
    check_figures,
    check_gradients,
    check_loss,
    cut,
    gradients_of,
    step_loss,
)
from tests.objectives.test_text_embedding import SIZES as TEXT_SIZES
from tests.support.command import mgpu, run_folder
from tests.support.pair_tokenizers import write_tokenizer
from tests.support.sampling import one_in

REASON = "sentence-transformers is the oracle of rerankers: pip install sentence-transformers"
LOSSES: tuple[RerankerLoss, ...] = ("binary", "listwise", "margin")
SIZES = {**TEXT_SIZES, "vocab_size": 44, "num_labels": 1}


def bert(seed: int = 0, dtype: torch.dtype = torch.float32) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    model: Any = BertForSequenceClassification(BertConfig(**SIZES))
    with torch.no_grad():
        model.classifier.bias.fill_(0.3)
    whole: BertForSequenceClassification = model.to(dtype)
    return whole


def objective_of(model: Any, loss: RerankerLoss) -> RerankerObjective:
    return RerankerObjective(model, None, lambda _: 1.0, RerankerConfig(loss=loss))


def published_loss(whole: Any, loss: RerankerLoss, rows: list[Any]) -> torch.Tensor:
    """Loss of sentence-transformers over ``rows``; in float64 the binary one is torch's, as theirs is in float32."""
    from sentence_transformers.cross_encoder import losses

    queries, documents = [row["query"] for row in rows], [[row["positive"], *row["negative"]] for row in rows]
    labels = [torch.tensor([1.0, *[0.0] * (len(each) - 1)]) for each in documents]
    if loss == "binary":
        flat = [document for each in documents for document in each]
        repeated = [query for query, each in zip(queries, documents, strict=True) for _ in each]
        result: torch.Tensor = losses.BinaryCrossEntropyLoss(whole)([repeated, flat], torch.cat(labels))
        if whole.dtype == torch.float64:
            scores = whole(whole.preprocess(list(zip(repeated, flat, strict=True))))["scores"][:, 0]
            result = F.binary_cross_entropy_with_logits(scores, torch.cat(labels).double())
    elif loss == "margin":
        result = losses.RankNetLoss(whole, reduction_log="natural")([queries, documents], labels)
    else:  # alone in its batch a query has no documents of others
        oracle = losses.MultipleNegativesRankingLoss(whole, num_negatives=None, scale=1, activation_fn=None)
        pairs = [pair for pair in zip(queries, documents, strict=True) if len(pair[1]) > 1]
        each = [oracle([[query], *([text] for text in texts)], torch.zeros(1)) for query, texts in pairs]
        result = torch.stack(each).mean()
    return result


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [*((loss, torch.float32) for loss in LOSSES), ("binary", torch.float64), ("listwise", torch.float64)],
)
def test_loss_and_gradients_are_those_of_sentence_transformers(
    tmp_path: Path, loss: RerankerLoss, dtype: torch.dtype
) -> None:
    """RankNetLoss computes in float32 alone. Most rows are longer than the model is to read."""
    library = pytest.importorskip("sentence_transformers", reason=REASON)
    rows, model = rows_of(9), bert(dtype=dtype)
    _, samples = samples_of(configured(tmp_path, rows, f"objective.loss={loss}"))
    batch = samples.batch(np.arange(9), np.arange(9))
    model.save_pretrained(tmp_path / "model")
    adapt_to_pairs(write_tokenizer(tmp_path / "model", "bert"), True)
    whole = library.CrossEncoder(str(tmp_path / "model"), max_length=14, device="cpu").to(dtype).train()
    expected = published_loss(whole, loss, rows)
    expected.backward()
    objective = objective_of(model, loss)
    found = step_loss(objective, cut(batch, 1, 6, 2), objective.batch_spec.valid_targets(batch))
    bound = 1e-6 if dtype == torch.float32 else 1e-10
    check_loss(found, expected, bound)
    assert gradients_of(whole).keys() == gradients_of(model).keys()
    check_gradients(model, gradients_of(whole), each=0, whole=bound)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_the_plain_formula_however_it_is_cut(loss: RerankerLoss) -> None:
    """The last sample counts nothing, and a process without data changes nothing."""
    model = bert()
    objective = objective_of(model, loss)
    batch = objective.random_batch(3, 2, 6, 9, packed=True)
    empty = objective.batch_spec.empty(5, torch.device("cpu"))
    check_cuts(objective, batch, model.bert.embeddings.word_embeddings.weight, empty)


def test_metrics_are_those_of_sentence_transformers() -> None:
    evaluation = pytest.importorskip("sentence_transformers.cross_encoder.evaluation", reason=REASON)
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(40, 25, generator=generator).double()
    counts = torch.randint(1, 25, (40,), generator=generator)
    there = torch.arange(25) <= counts[:, None]

    class Known:
        model_card_data: Any = None

        def predict(self, *_: Any, **__: Any) -> Any:
            return scores[there].numpy()

    samples = [{"query": "q", "positive": ["p"], "negative": ["n"] * int(count)} for count in counts]
    evaluator = evaluation.CrossEncoderRerankingEvaluator(samples, show_progress_bar=False)
    evaluator.store_metrics_in_model_card_data = lambda *_: None
    expected = evaluator(Known())
    sums = ranking_sums(scores.masked_fill(~there, -torch.inf), there.long())
    found = RERANKER.measured([0.0, *sums.tolist(), 1])
    names = ("mrr@10", "ndcg@10")
    check_figures([found[f"val/{name}"] for name in names], [expected[name] for name in names], 1e-10)
    first = [float(scores[row, 0]) > float(scores[row, 1 : 1 + count].max()) for row, count in enumerate(counts)]
    assert found["val/accuracy"] == pytest.approx(sum(first) / 40)


def test_equal_scores_are_no_ranking_and_queries_without_negatives_none() -> None:
    scores = torch.tensor([[1.0, 1.0, 0.5], [2.0, -torch.inf, -torch.inf], [1.0, 0.0, 0.0]])
    terms = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    assert ranking_sums(scores, terms).tolist() == pytest.approx([1.0, 0.0, 0.5, 1 / np.log2(3)])


def test_the_bias_is_not_trained_by_differences_of_scores(tmp_path: Path) -> None:
    frozen = {}
    for loss in LOSSES:
        config = configured(tmp_path, rows_of(4), f"objective.loss={loss}")
        model = run_model(prepare(config).complete(config))
        frozen[loss] = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == {"binary": [], "listwise": ["classifier.bias"], "margin": ["classifier.bias"]}


def test_attention_starts_on_equal_tokens(tmp_path: Path) -> None:
    drawn = []
    for matches in (False, True):
        config = configured(tmp_path, rows_of(4), f"objective.match_tokens={matches}".lower())
        drawn.append(materialise(run_model(prepare(config).complete(config)), 0, "cpu").state_dict())
    plain, matched = drawn
    small = ("position_embeddings.weight", "token_type_embeddings.weight")
    for name, value in matched.items():
        source = plain[name.replace("attention.self.key.weight", "attention.self.query.weight")]
        assert torch.equal(value, source * (0.25 if name.endswith(small) else 1)), name
    assert not all(torch.equal(value, plain[name]) for name, value in matched.items())
    (error,) = RerankerConfig(match_tokens=True).data_errors(DataConfig(), ModelConfig(path="folder"))
    assert "the weights of a folder are not drawn" in str(error)


def test_random_negatives_are_those_of_the_sample(tmp_path: Path) -> None:
    """However a batch is cut, so under any strategy and after a resume; other ones in each epoch."""
    rows: list[dict[str, Any]] = [
        {"query": f"w{at} w{at // 3}", "positive": f"w{at} w30", "negative": [f"w{at} w31"] * (at % 4 == 0)}
        for at in range(20)
    ]
    rows += [{"query": "w29", "positive": f"w2{at} w32"} for at in range(4)]
    given = ("data.random_negatives=3", "data.global_batch_size=8", "data.validation_fraction=0.2")
    config, plain = configured(tmp_path, rows, *given), configured(tmp_path, rows, *given, "data.random_negatives=0")
    tokenizer, prepared = AutoTokenizer.from_pretrained(tmp_path / "bert"), prepare(config)

    def ranked(batch: dict[str, torch.Tensor]) -> list[tuple[str, list[str]]]:
        """Query and documents of each sample."""
        whole = [[tokenizer.decode(ids).split(" [SEP]") for ids in row] for row in batch["input_ids"]]
        there = (batch["lengths"] > 0).tolist()
        return [
            (
                row[0][0].removeprefix("[CLS] "),
                [parts[1].strip() for parts, is_here in zip(row, known, strict=True) if is_here],
            )
            for row, known in zip(whole, there, strict=True)
        ]

    def drawn(micro: int, ranks: int, start: int = 0) -> list[tuple[str, list[str]]]:
        batches = cut_batches(config, RerankerObjective.samples, micro, ranks, start, 12)
        return [sample for batch in batches for sample in ranked(batch)]

    samples = drawn(8, 1)
    assert drawn(2, 2) == samples and drawn(4, 1, start=16) == samples[16:]
    known, corpus = {query: set() for query, _ in samples}, set()
    for row in rows:
        if row["query"] in known:
            known[row["query"]].add(row["positive"])
            corpus |= {row["positive"], *row["negative"]} if "negative" in row else {row["positive"]}
    seen: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for query, (positive, *others) in samples:
        assert positive in known[query] and not known[query] & set(others)
        assert len(set(others)) == len(others) and set(others) <= corpus, "of the split"
        seen.setdefault((query, positive), set()).add(tuple(others))
    assert {other for _, documents in samples for other in documents} == corpus
    assert all(len(draws) > 3 for draws in seen.values()), "each epoch draws others"
    every = np.arange(prepared.validation_samples)
    held = [
        ranked(RerankerObjective.samples(each, prepared.open(each, "validation")).batch(every, -1 - every))
        for each in (config, replace(config, seed=config.seed + 1))
    ]
    assert held[0] == held[1] and all(len(documents) > 3 for _, documents in held[0])
    assert not {query for query, _ in held[0]} & set(known)
    own = RerankerObjective.samples(config, prepared.open(config, "train"))
    batch = own.batch(every, every)
    assert own.positions(every) - own.padding(every) == int(batch["lengths"].sum())
    assert own.valid_units(every, every) == int(batch["terms"].sum())
    assert prepared.digest != prepare(plain).digest
    for number, split in ((30, "to train on"), (5, "held out")):
        with pytest.raises(
            ConfigError, match=rf"data\.random_negatives={number}: a query {split} has \d+ other documents"
        ):
            prepare(configured(tmp_path, rows, *given, f"data.random_negatives={number}"))


def ranked_rows(file: Path, number: int = 120) -> Path:
    """Writes queries, of which every fifth is long, whose positives have a word that negatives do not have."""
    draw = np.random.default_rng(0)
    rows = []
    for at in range(number):
        first, second, *others = (f"w{word}" for word in draw.permutation(20)[:6])
        negatives = [f"w31 {first} {others[0]}", f"w32 {others[1]}", f"w33 {others[2]} {others[3]}"][: 1 + at % 3]
        query = f"{first} {second}" + " w34 w35" * (at % 5 == 0)
        rows.append({"query": query, "positive": f"w30 {second}", "negative": negatives})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def metrics_of(out: str) -> dict[str, float]:
    """Those that ``eval`` printed."""
    found = re.findall(r"^(loss|accuracy|mrr@10|ndcg@10)\s+([\d.]+)", out, re.MULTILINE)
    assert len(found) == 4, out
    return {name: float(value) for name, value in found}


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "kind", "seq_len"), one_in(2, [("listwise", "bert", 8), ("binary", "plain", 7)]))
def test_a_run_ranks_and_its_export_gives_the_same_scores(
    tmp_path: Path, cache: Path, loss: RerankerLoss, kind: str, seq_len: int
) -> None:
    library = pytest.importorskip("sentence_transformers", reason=REASON)
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    file, tokenizer = ranked_rows(tmp_path / "ranked.jsonl"), write_tokenizer(tmp_path / "tokenizer", kind)
    data = ("data=embedding_pairs", f"data.paths=[{file}]", f"data.seq_len={seq_len}", f"data.tokenizer={tokenizer}")
    model = ("model=bert_tiny", "model.config.vocab_size=44", "model.config.pad_token_id=0", "optimizer.lr=1e-3")
    given = ("objective=reranker", f"objective.loss={loss}", "data.validation_fraction=0.2", *data, *model)
    run = ("trainer.accelerator=cpu", "trainer.devices=2", "strategy=ddp", "trainer.max_steps=60", "logger=none")
    folder = str(run_folder(mgpu(cache, tmp_path, *given, *run)))
    mgpu(cache, tmp_path, "export", folder, "--out", "exported")
    held_out = (*data, f"data.validation_paths=[{file}]")
    outs = [mgpu(cache, tmp_path, "eval", place, "--device", "cpu", *held_out) for place in (folder, "exported")]
    found = [metrics_of(out) for out in outs]
    assert found[0]["accuracy"] > 90
    assert {name: value for name, value in found[0].items() if name != "loss"} == {
        name: value for name, value in found[1].items() if name != "loss"
    }
    whole = library.CrossEncoder(str(tmp_path / "exported"), device="cpu")
    config = compose([*given, f"data.cache_dir={cache}", "data.validation_fraction=0"])[0]
    check_scores(config, whole, loss, file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    samples = [{**row, "positive": [row["positive"]]} for row in rows]
    evaluator = CrossEncoderRerankingEvaluator(samples, show_progress_bar=False)
    expected = evaluator(whole)
    assert found[0]["ndcg@10"] == pytest.approx(expected["ndcg@10"], abs=1e-6)
    assert found[0]["mrr@10"] == pytest.approx(expected["mrr@10"], abs=1e-6)


def check_scores(config: RunConfig, whole: Any, loss: RerankerLoss, file: Path) -> None:
    """``whole`` gives the scores of the objective with its weights."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    prepared, samples = samples_of(config)
    objective = objective_of(whole.model, loss)
    every = np.arange(len(rows))
    with torch.no_grad():
        scores = objective._scores(samples.batch(every, every))
    pairs = [(row["query"], document) for row in rows for document in (row["positive"], *row["negative"])]
    expected = scores.sigmoid() if loss == "binary" else scores
    np.testing.assert_allclose(whole.predict(pairs), expected[scores.isfinite()].numpy(), atol=1e-6)
    assert prepared.too_long_samples > 0, "no row is cut"
