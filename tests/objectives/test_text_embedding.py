"""Text embeddings. Oracle: sentence-transformers' losses and its evaluator of information retrieval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import BertConfig, BertModel

from benchmarks import support
from benchmarks.speed import embeddings
from mgpu_pipe.objectives.text_embedding import TextEmbeddingObjective, search_sums
from mgpu_pipe.objectives.text_vectors import TextVectorObjective
from mgpu_pipe.objectives.vector_keys import SEARCH_METRICS, TEXT_EMBEDDING, TextEmbeddingConfig
from tests.objectives.harness import (
    check_figures,
    check_gradients,
    check_loss,
    cut,
    gradients_of,
    step_loss,
    vector_errors,
)
from tests.support.sampling import sampled

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0},
    **{"attention_probs_dropout_prob": 0.0, "initializer_range": 0.3},
}
SEQ_LEN, SAMPLES = 9, 6
REASON = "sentence-transformers is the oracle of embeddings: pip install sentence-transformers"


def objective_of(model: Any, **keys: Any) -> TextEmbeddingObjective:
    return TextEmbeddingObjective(model, None, lambda _: 1.0, TextEmbeddingConfig(**keys))


def bert(seed: int = 0, dtype: torch.dtype = torch.float32) -> BertModel:
    torch.manual_seed(seed)
    model: Any = BertModel(BertConfig(**SIZES))
    return cast(BertModel, model.to(dtype))


def batch_of(texts: int, samples: int = SAMPLES, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random texts of random lengths, all of them different."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, SIZES["vocab_size"], (samples, texts, SEQ_LEN), generator=generator)
    lengths = torch.randint(2, SEQ_LEN + 1, (samples, texts), generator=generator)
    ids[torch.arange(SEQ_LEN) >= lengths.unsqueeze(-1)] = 0
    return {
        "input_ids": ids,
        "lengths": lengths,
        "text_numbers": torch.arange(1, 1 + samples * texts).view(samples, texts),
    }


def mean_loss(objective: TextVectorObjective, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The loss of a step of these micro-batches; backpropagated."""
    return step_loss(objective, batches, sum(len(batch["lengths"]) for batch in batches))


def columns_of(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The texts as sentence-transformers takes them."""
    mask = (torch.arange(SEQ_LEN) < batch["lengths"].unsqueeze(-1)).long()
    texts = range(batch["lengths"].shape[1])
    return [{"input_ids": batch["input_ids"][:, at], "attention_mask": mask[:, at]} for at in texts]


@pytest.fixture
def published(tmp_path: Path) -> Any:
    """Builds sentence-transformers' model around a BERT."""
    library = pytest.importorskip("sentence_transformers", reason=REASON)

    def build(model: BertModel, pooling: str, dtype: torch.dtype) -> Any:
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        model.save_pretrained(tmp_path / "bert")
        words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]").save_pretrained(tmp_path / "bert")
        modules = library.sentence_transformer.modules
        encoder = modules.Transformer(str(tmp_path / "bert"))
        mode = {"last_token": "lasttoken"}.get(pooling, pooling)
        whole = library.SentenceTransformer(
            modules=[encoder, modules.Pooling(SIZES["hidden_size"], pooling_mode=mode)], device="cpu"
        )
        return whole.to(dtype).train()

    return build


@pytest.mark.parametrize(
    ("texts", "pooling", "symmetric", "dtype"),
    [
        (2, "mean", False, torch.float32),
        (3, "cls", False, torch.float32),
        (4, "last_token", True, torch.float32),
        (3, "mean", True, torch.float64),
    ],
)
def test_loss_and_gradients_are_those_of_sentence_transformers(
    published: Any, texts: int, pooling: str, symmetric: bool, dtype: torch.dtype
) -> None:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model, batch = bert(dtype=dtype), batch_of(texts)
    whole = published(model, pooling, dtype)
    directions: Any = ("query_to_doc", "doc_to_query") if symmetric else ("query_to_doc",)
    oracle = MultipleNegativesRankingLoss(whole, scale=20.0, directions=directions, partition_mode="per_direction")
    expected = oracle(columns_of(batch), torch.zeros(SAMPLES))
    expected.backward()
    loss = mean_loss(objective_of(model, pooling=pooling, symmetric=symmetric), cut(batch, 1, 2, 3))
    bound = 1e-6 if dtype == torch.float32 else 1e-10
    check_loss(loss, expected, bound)
    errors = vector_errors(model, whole)
    assert max(errors.values()) <= bound, max(errors.items(), key=lambda item: item[1])


def test_shortened_vectors_add_the_losses_of_sentence_transformers(published: Any) -> None:
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss

    model, batch = bert(), batch_of(3)
    whole = published(model, "mean", torch.float32)
    oracle = MatryoshkaLoss(whole, MultipleNegativesRankingLoss(whole, scale=20.0), [SIZES["hidden_size"], 8, 3])
    expected = oracle(columns_of(batch), torch.zeros(SAMPLES))
    expected.backward()
    loss = mean_loss(objective_of(model, matryoshka_sizes=[8, 3]), cut(batch, 1, 2, 3))
    check_loss(loss, expected, 1e-6)
    wanted = {name: gradient for name, gradient in gradients_of(whole).items() if not name.startswith("pooler.")}
    check_gradients(model, wanted, each=0, whole=1e-6)


@pytest.mark.parametrize("sizes", [[16], [0], [4, 4]])
def test_sizes_that_vectors_do_not_have_are_refused(sizes: list[int]) -> None:
    (error,) = TextEmbeddingConfig(matryoshka_sizes=sizes).model_errors({"hidden_size": 16})
    assert "use different numbers from 1 to 15" in str(error)
    assert not TextEmbeddingConfig(matryoshka_sizes=[15, 1]).model_errors({"dim": 16})


def test_the_loss_does_not_depend_on_the_cut() -> None:
    batch = batch_of(3)
    results = []
    for sizes in ((6,), (2, 2, 2), (1, 5)):
        model = bert()
        loss = mean_loss(objective_of(model, symmetric=True), cut(batch, *sizes))
        results.append((loss, model.embeddings.word_embeddings.weight.grad))
    for loss, gradient in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-6, atol=0)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("symmetric", [False, True])
def test_equal_texts_are_no_negatives(symmetric: bool) -> None:
    """Samples 0 and 1 have one positive, 2 and 3 one query: what is equal leaves the sum of the others."""
    batch, model = batch_of(3), bert()
    numbers = batch["text_numbers"]
    numbers[1, 1], numbers[3, 0], numbers[4, 2] = numbers[0, 1], numbers[2, 0], 0
    objective = objective_of(model, symmetric=symmetric)
    masked = mean_loss(objective, cut(batch, 6))
    reference = objective.reference_loss(lambda **inputs: model(**inputs), model, missing_negative(batch))
    torch.testing.assert_close(masked, reference.loss_sum / SAMPLES, rtol=1e-5, atol=0)
    unmasked = mean_loss(objective_of(model, symmetric=symmetric, mask_equal=False), cut(batch, 6))
    assert float(unmasked) > float(masked) + 1e-3


@pytest.mark.parametrize("symmetric", [False, True])
def test_texts_that_are_too_near_are_no_negatives(symmetric: bool) -> None:
    """Oracle: autograd of the cross-entropy without them. A positive is its query: no text is nearer."""
    batch, margin = batch_of(3), 0.02
    batch["input_ids"][0, 1], batch["lengths"][0, 1] = batch["input_ids"][0, 0], batch["lengths"][0, 0]
    model, plain = bert(), bert()
    masked = mean_loss(objective_of(model, symmetric=symmetric, mask_margin=margin), cut(batch, 2, 4))
    features = objective_of(plain, symmetric=symmetric).encode(batch)
    queries, documents = features["queries"], features["documents"]
    to_document = queries @ documents.flatten(0, 1).T
    sides = [(to_document, torch.arange(SAMPLES) * 2), (documents[:, 0] @ queries.T, torch.arange(SAMPLES))]
    losses, left_out = [], []
    for scores, right in sides[: 1 + symmetric]:
        most = scores.gather(1, right[:, None]) - 20 * margin
        near = (scores > most).scatter(1, right[:, None], False)
        losses.append(torch.nn.functional.cross_entropy(scores.masked_fill(near, -torch.inf), right))
        left_out.append(int(near.sum()))
    expected = torch.stack(losses).mean()
    expected.backward()
    assert all(0 < number < 40 for number in left_out), left_out
    torch.testing.assert_close(masked, expected.detach(), rtol=1e-5, atol=1e-6)
    found, wanted = (m.embeddings.word_embeddings.weight.grad for m in (model, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    unmasked = mean_loss(objective_of(bert(), symmetric=symmetric), cut(batch, 6))
    assert float(unmasked) > float(masked) + 1e-3


def missing_negative(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**batch, "lengths": batch["lengths"].where(batch["text_numbers"] > 0, 0)}


def test_a_missing_negative_changes_nothing() -> None:
    batch = batch_of(3)
    batch["text_numbers"][:, 2], batch["lengths"][:, 2] = 0, 0
    pairs = {name: value[:, :2] for name, value in batch.items()}
    (with_gap, gap_model), (without, model) = (
        (mean_loss(objective_of(model), cut(given, 4, 2)), model) for given, model in ((batch, bert()), (pairs, bert()))
    )
    torch.testing.assert_close(with_gap, without)
    torch.testing.assert_close(
        gap_model.embeddings.word_embeddings.weight.grad, model.embeddings.word_embeddings.weight.grad
    )


def test_missing_texts_are_not_encoded() -> None:
    batch, model, rows = batch_of(4), bert(), list[int]()
    batch["text_numbers"][1:, 2:], batch["lengths"][1:, 2:] = 0, 0
    model.register_forward_pre_hook(lambda _, args, given: rows.append(len(given["input_ids"])), with_kwargs=True)
    features = objective_of(model).encode(batch)
    assert rows == [2 * SAMPLES + 2] and features["documents"].shape == (SAMPLES, 3, SIZES["hidden_size"])
    assert not features["documents"][1:, 1:].any() and features["documents"][0].any(-1).all()
    objective_of(model).encode({**batch, "lengths": torch.zeros_like(batch["lengths"])})
    assert rows[1:] == [1], "a process without texts has to run the model too"


@pytest.mark.parametrize("block", [1 << 22, 64])
def test_metrics_are_those_of_sentence_transformers(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Some queries have two texts to find, some texts are found by two queries; blocks of scores change nothing."""
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation", reason=REASON)
    monkeypatch.setattr("mgpu_pipe.objectives.text_embedding.SCORES_AT_ONCE", block)
    generator = torch.Generator().manual_seed(3)
    samples, width = 60, 4
    numbers = torch.stack([torch.arange(samples) % 50 + 1, torch.arange(samples) % 55 + 100, torch.zeros(samples)], 1)
    numbers[::2, 2] = torch.arange(30) + 1000
    numbers = numbers.long()
    vectors = torch.nn.functional.normalize(torch.randn(2000, width, generator=generator), dim=1)
    features = {"queries": vectors[numbers[:, 0]], "documents": vectors[numbers[:, 1:]], "numbers": numbers}
    parts = [({name: value[at : at + 25] for name, value in features.items()}, at) for at in (0, 25, 50)]
    every = [(part, slice(0, len(part["numbers"]))) for part, _ in parts]
    halves = [
        search_sums([(part, slice(0, 10)) for part, _ in parts]),
        search_sums([(part, slice(10, len(part["numbers"]))) for part, _ in parts]),
    ]
    sums = search_sums(every)
    torch.testing.assert_close(sums, halves[0] + halves[1])
    names = [str(number) for number in numbers[:, 0].tolist()]
    wanted: dict[str, set[str]] = {}
    for query, positive in zip(names, numbers[:, 1].tolist(), strict=True):
        wanted.setdefault(query, set()).add(str(positive))
    corpus = {str(number): str(number) for number in numbers[:, 1:].flatten().tolist() if number}
    oracle = evaluation.InformationRetrievalEvaluator(
        {name: name for name in names}, corpus, wanted, show_progress_bar=False
    )

    class Encoder:
        similarity_fn_name, similarity = "dot", staticmethod(lambda a, b: a @ b.T)
        model_card_data = None

        def encode(self, texts: list[str], **_: Any) -> torch.Tensor:
            return vectors[torch.tensor([int(text) for text in texts])]

        encode_query = encode_document = encode

    class Scores(type(oracle)):  # type: ignore[misc]
        def embed_inputs(self, model: Any, texts: list[str], **_: Any) -> torch.Tensor:
            return Encoder().encode(list(texts))

    oracle.__class__ = Scores
    oracle.score_functions, oracle.score_function_names = {"dot": lambda a, b: a @ b.T}, ["dot"]
    scores = oracle.compute_metrices(Encoder())["dot"]
    expected = (
        scores["precision_recall@k"] if "precision_recall@k" in scores else scores["recall@k"][1],
        scores["recall@k"][10],
        scores["mrr@k"][10],
        scores["ndcg@k"][10],
    )
    found = TEXT_EMBEDDING.measured([0.0, *sums.tolist(), 60])
    check_figures([found[f"val/{name}"] for name in SEARCH_METRICS], list(expected), 1e-9)


@pytest.mark.parametrize(
    ("queries", "rows"), [((1, 2, 3), slice(3, 3)), ((1, 1, 1), slice(1, 2))], ids=["no row", "no first row"]
)
def test_a_process_without_the_first_row_of_a_query_adds_nothing(queries: tuple[int, ...], rows: slice) -> None:
    numbers = torch.tensor([[query, 101 + at] for at, query in enumerate(queries)])
    vectors = torch.eye(3)
    features = {"queries": vectors, "documents": vectors[:, None], "numbers": numbers}
    assert search_sums([(features, rows)]).tolist() == [0] * 5
    assert search_sums([(features, slice(0, 3))])[0] == len(set(queries))


def test_the_pooler_is_not_trained() -> None:
    from mgpu_pipe.config.hydra.compose import compose
    from mgpu_pipe.models.build import run_model

    config, _ = compose(["objective=text_embedding", "model=bert_tiny", "data=stdlib_pairs"])
    trained = {name: parameter.requires_grad for name, parameter in run_model(config).named_parameters()}
    assert [name for name, is_trained in trained.items() if not is_trained] == [
        "pooler.dense.weight",
        "pooler.dense.bias",
    ]
    assert isinstance(run_model(config), BertModel)


@pytest.mark.parametrize(
    ("loss", "texts", "dtype"),
    [
        ("margin_mse", 3, torch.float32),
        ("margin_mse", 4, torch.float64),
        ("kl", 3, torch.float64),
        ("kl", 4, torch.float32),
    ],
)
def test_a_teachers_loss_and_gradients_are_those_of_sentence_transformers(
    published: Any, loss: str, texts: int, dtype: torch.dtype
) -> None:
    from sentence_transformers import util
    from sentence_transformers.sentence_transformer import losses

    model, batch = bert(dtype=dtype), batch_of(texts)
    batch["scores"] = torch.randn(SAMPLES, texts - 1, generator=torch.Generator().manual_seed(5))
    whole = published(model, "mean", dtype)
    if loss == "kl":
        oracle: Any = losses.DistillKLDivLoss(
            whole, similarity_fct=util.pairwise_cos_sim, student_temperature=0.5, teacher_temperature=0.25
        )
    else:
        oracle = losses.MarginMSELoss(whole)
    expected = oracle(columns_of(batch), batch["scores"].to(dtype))
    expected.backward()
    keys: dict[str, Any] = {"scale": 2.0, "teacher_scale": 4.0} if loss == "kl" else {"normalize": False}
    found = mean_loss(objective_of(model, loss=loss, **keys), cut(batch, 1, 2, 3))
    bound = 1e-6 if dtype == torch.float32 else 1e-10
    check_loss(found, expected, bound)
    wanted = {name: gradient for name, gradient in gradients_of(whole).items() if not name.startswith("pooler.")}
    # Slopes of a query's documents cancel: what is left of a bias is rounded as the sum of all gradients is.
    check_gradients(model, wanted, each=bound, whole=bound / 10)


@pytest.mark.slow
@pytest.mark.parametrize("part", sampled([(part,) for part in embeddings.PARTS], lambda part: part == "peak"))
def test_the_benchmark_compares_with_sentence_transformers(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny sizes; it compares losses and vectors itself. At equally many texts a pass, the peak is not higher."""
    pytest.importorskip("sentence_transformers", reason=REASON)
    monkeypatch.setattr(support, "RESULTS", tmp_path / "results")
    model = {**embeddings.SIZES, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    few = {"batch": 16, "texts": 4, "pairs": (2,), "seq_len": 64, "blocks": 1, "steps": 2, "large": 64, "micro": 4}
    sizes = embeddings.Sizes(**few, files=40, model=tuple(model.items()))
    embeddings.write_model(tmp_path / "model", sizes)
    embeddings.PARTS[part](tmp_path, sizes)
    [file] = (tmp_path / "results").iterdir()
    ratios = {row["what"]: row["ratio"] for row in json.loads(file.read_text())["rows"]}
    assert all(ratio > 0 for ratio in ratios.values())
    assert ratios.get("micro-batches of 2 pairs: peak MB", 0.0) <= 1.0
