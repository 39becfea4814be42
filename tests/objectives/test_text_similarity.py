"""Similarity of sentences. Oracle: sentence-transformers' losses, and its evaluator's correlations (scipy's)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mgpu_pipe.cli.verbs.eval import _keys_of_vectors
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.objectives.losses.vectors import cosent, ranks, shares_of_correlation
from mgpu_pipe.objectives.sample_group import SingleProcess
from mgpu_pipe.objectives.text_vectors import TextSimilarityObjective
from mgpu_pipe.objectives.vector_keys import TextSimilarityConfig, measure_similarity
from tests.objectives.harness import check_cuts, check_figures, check_loss, cut, vector_errors
from tests.objectives.test_text_embedding import REASON, SIZES, batch_of, bert, columns_of, mean_loss, published
from tests.support.command import mgpu
from tests.support.embedding_pairs import write_scored_pairs

__all__ = ["published"]
SCORES = torch.tensor([0.2, 1.0, 0.2, 0.0, 0.6, -0.4])


def objective_of(model: Any, **keys: Any) -> TextSimilarityObjective:
    return TextSimilarityObjective(model, None, lambda _: 1.0, TextSimilarityConfig(**keys))


def scored_batch() -> dict[str, torch.Tensor]:
    batch = batch_of(2)
    return {"input_ids": batch["input_ids"], "lengths": batch["lengths"], "scores": SCORES}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("loss", "pooling"), [("cosent", "mean"), ("cosine", "cls")])
def test_loss_and_gradients_are_those_of_sentence_transformers(
    published: Any, loss: str, pooling: str, dtype: torch.dtype
) -> None:
    """Float32 rounds differently on each processor: gradients that differ by more are nearer to the exact ones."""
    from sentence_transformers.sentence_transformer.losses import CoSENTLoss, CosineSimilarityLoss

    batch = scored_batch()

    def published_loss(dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
        whole = published(bert(dtype=dtype), pooling, dtype)
        oracle = CoSENTLoss(whole, scale=20.0) if loss == "cosent" else CosineSimilarityLoss(whole)
        result = oracle(columns_of(batch), SCORES.to(dtype))
        result.backward()
        return whole, result

    model, (whole, expected) = bert(dtype=dtype), published_loss(dtype)
    found = mean_loss(objective_of(model, loss=loss, pooling=pooling), cut(batch, 1, 2, 3))
    bound = 1e-6 if dtype == torch.float32 else 1e-10
    check_loss(found, expected, bound)
    errors = vector_errors(model, whole)
    if max(errors.values()) > bound:
        exact, _ = published_loss(torch.float64)
        ours, theirs = (max(vector_errors(each, exact).values()) for each in (model, whole))
        assert ours < theirs, max(errors.items(), key=lambda item: item[1])


def test_shortened_vectors_add_the_losses_of_sentence_transformers(published: Any) -> None:
    from sentence_transformers.sentence_transformer.losses import CoSENTLoss, MatryoshkaLoss

    model, batch = bert(), scored_batch()
    whole = published(model, "mean", torch.float32)
    expected = MatryoshkaLoss(whole, CoSENTLoss(whole), [SIZES["hidden_size"], 8, 3])(columns_of(batch), SCORES)
    expected.backward()
    found = mean_loss(objective_of(model, matryoshka_sizes=[8, 3]), cut(batch, 1, 2, 3))
    check_loss(found, expected, 1e-6)
    assert max(vector_errors(model, whole).values()) < 1e-5


@pytest.mark.parametrize("loss", ["cosent", "cosine"])
def test_the_loss_is_the_plain_formula_however_it_is_cut(loss: str) -> None:
    model = bert()
    check_cuts(objective_of(model, loss=loss), scored_batch(), model.embeddings.word_embeddings.weight)


def test_equal_scores_and_large_similarities_leave_the_loss_finite() -> None:
    """Oracle: autograd of the formula over all comparisons, in float64."""
    generator = torch.Generator().manual_seed(0)
    for similarities, scores in (
        (torch.randn(40, generator=generator) * 20, torch.randint(0, 6, (40,), generator=generator) / 5),
        (torch.tensor([300.0, -300.0, 0.0]), torch.tensor([0.0, 1.0, 1.0])),
        (torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5])),
    ):
        values = similarities.double().requires_grad_()
        differences = (values[:, None] - values)[scores[:, None] < scores]
        expected = torch.cat([torch.zeros(1).double(), differences]).logsumexp(0)
        expected.backward()
        loss, gradients = cosent(similarities.double(), scores)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients, values.grad, rtol=1e-9, atol=1e-12)


def test_correlations_are_those_of_sentence_transformers() -> None:
    """Sums over processes that each have some of the pairs; scores and similarities have ties."""
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation", reason=REASON)
    generator = torch.Generator().manual_seed(3)
    vectors = torch.nn.functional.normalize(torch.randn(2, 60, 4, generator=generator), dim=-1)
    vectors[:, 40:50] = vectors[:, :10]
    scores = torch.randint(0, 6, (60,), generator=generator).float()
    features = {"queries": vectors[0] * 20, "documents": vectors[1][:, None], "scores": scores}
    parts = [{name: value[at : at + 25] for name, value in features.items()} for at in (0, 25, 50)]
    sums = torch.zeros(3, dtype=torch.float64)
    for first, last in ((0, 10), (10, 25)):  # two processes
        objective = objective_of(bert())
        for part in parts:
            objective.collect_heldout(part, slice(min(first, len(part["scores"])), min(last, len(part["scores"]))))
        sums += objective.last_sums(SingleProcess())

    class Known(evaluation.EmbeddingSimilarityEvaluator):  # type: ignore[name-defined]
        def embed_inputs(self, model: Any, texts: list[str], **_: Any) -> Any:
            return vectors[0 if texts[0] == "first" else 1].numpy()

    oracle = Known(["first"] * 60, ["second"] * 60, scores.tolist(), main_similarity="cosine", show_progress_bar=False)
    oracle.similarity_fn_names = ["cosine"]
    encoder: Any = type("Encoder", (), {"similarity_fn_name": "cosine", "model_card_data": None})()
    oracle.store_metrics_in_model_card_data = lambda *_: None
    expected = oracle(encoder)
    found = measure_similarity([0.0, *sums[1:].tolist(), 60])
    names = ("spearman", "pearson")
    check_figures([found[f"val/{name}"] for name in names], [expected[f"{name}_cosine"] for name in names], 1e-6)


def test_equal_values_have_the_mean_of_their_ranks() -> None:
    assert ranks(torch.tensor([3.0, 1.0, 3.0, 7.0])).tolist() == [2.5, 1.0, 2.5, 4.0]
    assert shares_of_correlation(torch.ones(3), torch.arange(3)).isnan().all()


@pytest.mark.slow
def test_correlations_of_a_run_are_those_of_its_export(tmp_path: Path, cache: Path) -> None:
    """Before and after training, by ``eval``; sentence-transformers loads the exported folder."""
    library = pytest.importorskip("sentence_transformers", reason=REASON)
    file = write_scored_pairs(tmp_path / "scored.jsonl")
    data = ("data=scored_pairs", f"data.paths=[{file}]", f"data.validation_paths=[{file}]", "data.seq_len=24")
    sizes = ("model=bert_tiny", "model.config.vocab_size=384", "objective=text_similarity", "optimizer.lr=1e-3")
    run = ("strategy=single", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.max_steps=12", "run.dir=run")
    mgpu(cache, tmp_path, *data, *sizes, *run)
    mgpu(cache, tmp_path, "export", "run", "--out", "exported")
    found = [
        correlations(mgpu(cache, tmp_path, "eval", place, "--device", "cpu", *data)) for place in ("run", "exported")
    ]
    assert found[0] == found[1] and found[0]["spearman"] > 0.3
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    columns = ([row[name] for row in rows] for name in ("sentence1", "sentence2", "score"))
    evaluator = library.sentence_transformer.evaluation.EmbeddingSimilarityEvaluator(*columns)
    expected = evaluator(library.SentenceTransformer(str(tmp_path / "exported"), device="cpu"))
    assert found[0]["pearson"] == pytest.approx(expected["pearson_cosine"], abs=2e-6)
    assert found[0]["spearman"] == pytest.approx(expected["spearman_cosine"], abs=1e-3)  # rounding swaps ranks


def correlations(out: str) -> dict[str, float]:
    """Those that ``eval`` printed."""
    pairs = re.findall(r"^(spearman|pearson)\s+([-\d.]+)", out, re.MULTILINE)
    assert len(pairs) == 2, out
    return {name: float(value) for name, value in pairs}


def test_dot_products_are_no_cosines() -> None:
    (error,) = TextSimilarityConfig(loss="cosine", normalize=False).model_errors({"hidden_size": 16})
    assert "objective.normalize=False" in str(error).replace("false", "False")
    assert not TextSimilarityConfig(normalize=False).model_errors({"hidden_size": 16})


@pytest.mark.parametrize(("similarity", "normalizes"), [(None, True), ("cosine", True), ("dot", False)])
def test_a_folder_is_compared_by_its_similarity(tmp_path: Path, similarity: str | None, normalizes: bool) -> None:
    """Also where no module normalises the vectors."""
    write_modules(tmp_path, similarity)
    assert _keys_of_vectors(tmp_path, DataConfig(), ())[0]["normalize"] is normalizes


def test_a_similarity_that_eval_does_not_compute_is_refused(tmp_path: Path) -> None:
    write_modules(tmp_path, "euclidean")
    with pytest.raises(BadInputError, match="compares vectors by euclidean, not by cosine or dot product; use"):
        _keys_of_vectors(tmp_path, DataConfig(), ())


def write_modules(folder: Path, similarity: str | None) -> None:
    """Files of a sentence-transformers folder without Normalize."""
    types = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [{"type": f"sentence_transformers.models.{name}", "path": path} for name, path in types.items()]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"similarity_fn_name": similarity}))
