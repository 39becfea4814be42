"""LLaVA. Oracle: transformers' own model, one conversation at a time, in one process."""

from __future__ import annotations

import io
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.images.chat_rows import rows_of
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.preview import lengths_of, places_of_pictures
from mgpu_pipe.data.text.render_chat import ChatTemplate
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.errors import ConfigErrors, DataError
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.vision_language import VisionLanguageObjective
from tests.objectives.harness import GREEDY, check_logits, check_trained_on, exported_model, generated
from tests.support import small_runs
from tests.support.command import four_steps
from tests.support.needs import need_digits
from tests.support.pictures import folder_of_classes, said
from tests.verify.support import small_run

GIVEN = ("objective=vision_language", "model=llava_tiny", "logger=none", "trainer.progress=off")
LLAVA = (*GIVEN, "data.packing=none")
CLASS = "AutoModelForImageTextToText"
FOUR, TWO_STAGES = "model.config.text_config.num_hidden_layers=4", ("interleaved_1f1b", "zbv")
"""Layers for schedules with two stages on each of two ranks."""


def made(**config: Any) -> VisionLanguageObjective:
    small = small_run(*LLAVA, "trainer.devices=1", "strategy=single").model
    small.config.update(config)
    return VisionLanguageObjective(materialise(build_meta(small, CLASS), 1, "cpu"), None, lambda step: 1.0, 7)


def test_a_blank_picture_changes_nothing_and_every_answer_is_judged_whole() -> None:
    objective = made()
    model: Any = objective.model
    batch = objective.random_batch(3, 2, 6, 32, packed=False)
    assert len(set(batch["pictures"].tolist())) > 2, "no picture, one, and several"
    alone = {name: value[batch["pictures"] == 0] for name, value in batch.items()}
    inputs = objective.model_inputs(alone)
    assert len(inputs["pixel_values"]) == 1 and len(inputs["input_ids"]) == len(alone["input_ids"]) + 1
    objective.micro_batch_loss(alone).backward()  # type: ignore[no-untyped-call]
    seeing = [p.grad for name, p in model.named_parameters() if "vision_tower.encoder" in name]
    assert all(grad is not None and not grad.any() for grad in seeing), "gradients are there, and zero"
    # The labels become what the model says: then every answer is right, and one token beside it makes one wrong.
    right = dict(batch)
    with torch.no_grad():
        logits = model(**objective.model_inputs(batch)).logits
    right["labels"] = torch.where(batch["labels"] == IGNORE_INDEX, IGNORE_INDEX, logits.argmax(-1))
    answers = int((batch["labels"] != IGNORE_INDEX).any(1).sum())
    row, place = (right["labels"] != IGNORE_INDEX).nonzero()[0].tolist()
    for wrong in (0, 1):
        right["labels"][row, place] += wrong
        with torch.no_grad():
            assert objective.evaluation_sums(right)[1:].tolist() == [answers - wrong, answers]


@pytest.mark.parametrize(
    ("tower", "select", "places"), [("clip", "default", 4), ("clip", "full", 5), ("siglip", "full", 4)]
)
def test_a_picture_has_as_many_places_as_vectors(tower: str, select: str, places: int) -> None:
    """transformers' own model refuses any other number."""
    vision = {**small_run(*LLAVA, "trainer.devices=1", "strategy=single").model.config["vision_config"]}
    vision["model_type"] = f"{tower}_vision_model"
    del vision["projection_dim"]
    objective = made(vision_config=vision, vision_feature_select_strategy=select)
    batch = objective.random_batch(3, 2, 6, 32, packed=False)
    image = objective.model.config.image_token_id  # type: ignore[union-attr]
    assert int((batch["input_ids"] == image).sum()) == places * int(batch["pictures"].sum()) > 0  # type: ignore[attr-defined]
    assert torch.isfinite(objective.micro_batch_loss(batch))


PART = {"type": "image"}
ROWS = [
    {"messages": said([PART, {"type": "text", "text": "What is it?"}], "dark"), "images": ["p/dark/0.png"]},
    {"messages": said([{"type": "image", "path": "p/light/0.png"}, {"type": "text", "text": "And it?"}], "light")},
    {
        "image": "p/dark/1.png",
        "conversations": [
            {"from": "human", "value": "<image>\nWhat is it?"},
            {"from": "gpt", "value": "dark"},
            {"from": "human", "value": "Really?"},
            {"from": "gpt", "value": "Yes."},
        ],
    },
    {"messages": said("Compare <image> and <image>.", "two"), "images": ["p/light/1.png", "p/stripes/1.png"]},
    {"messages": said("Do you see me?", "No.")},
]


def chats(folder: Path, *overrides: str, rows: list[Any] = ROWS) -> RunConfig:
    """Conversations with pictures, in a list; each row several times, so that some are held out."""
    if not (folder / "chats.jsonl").exists():
        folder_of_classes(folder / "p")
        (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape = ("model.config.vision_config.image_size=16", "model.config.vision_config.patch_size=4", "data.seq_len=64")
    shape = (*shape, "model.config.vision_config.num_channels=3")
    given = ("data=picture_chats", f"data.paths=[{folder / 'chats.jsonl'}]", f"data.cache_dir={folder / 'cache'}")
    more = ("data.chat_template=chatml", "trainer.max_steps=4", "data.validation_fraction=0.4", "data.shift=2")
    sizes = ("data.global_batch_size=4", "model.config.text_config.vocab_size=300")
    return compose([*GIVEN, *given, *shape, *more, *sizes, *overrides])[0]


run = partial(small_runs.run, chats)


@pytest.mark.slow
def test_conversations_of_every_form_become_rows_with_places(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    config = chats(tmp_path, "data.validation_fraction=0")
    prepared = read_prepared(json.loads(json.dumps(prepare(config).as_dict())))
    samples, every = prepared.open(config, "train"), np.arange(len(ROWS))
    batch, again = samples.batch(every, every), samples.batch(every, every)
    assert all(torch.equal(batch[name], again[name]) for name in batch), "changes are drawn by seed and sample"
    assert batch["pictures"].tolist() == [1, 1, 1, 2, 0]
    assert batch["pixel_values"].shape == (5, 2, 3, 16, 16)
    assert samples.valid_units(every, every) == int((batch["labels"] != IGNORE_INDEX).sum())
    model = prepared.complete(config).model.config
    assert (batch["input_ids"] == model["image_token_index"]).sum(1).tolist() == [16, 16, 16, 32, 0]
    assert model["image_seq_length"] == 16
    lengths = lengths_of(prepared)
    stored = np.diff(TokenStore.open(prepared.folder).offsets)  # type: ignore[attr-defined]
    assert lengths is not None and (lengths[0] - stored).tolist() == [15, 15, 15, 30, 0]
    assert places_of_pictures(prepared) == (5, 80), "pictures, and the tokens that stand for them"
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_folder / "tokenizer.json"))  # type: ignore[operator]
    kept = [tokenizer.decode(row[row != IGNORE_INDEX].tolist()).split() for row in batch["labels"]]
    assert kept == [["dark"], ["light"], ["darkYes."], ["two"], ["No."]], "the answers alone"
    held = chats(tmp_path)
    first = prepare(held)
    moved = tmp_path / "elsewhere" / "and deeper"
    assert prepare(chats(moved)).validation_samples == first.validation_samples, "wherever the folder lies"
    keys = [[row.key for row in rows_of(held.data, [folder / "chats.jsonl"])] for folder in (tmp_path, moved)]  # type: ignore[arg-type]
    assert keys[0] == keys[1]
    assert first.train_samples + first.validation_samples == len(ROWS) and first.validation_samples == 2
    short = prepare(chats(tmp_path, "data.validation_fraction=0", "data.seq_len=48"))
    assert short.train_samples == 3 and short.too_long_samples == 2


LLAVA_15 = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""As llava-hf/llava-1.5-7b-hf has it: a content is a list of parts."""


def test_a_template_that_takes_parts_is_given_them() -> None:
    template = ChatTemplate(LLAVA_15)
    line = json.dumps({"messages": said("<image>\nWhat is it?", "A cat.")})
    text, spans, *_ = template.conversation(line, "here", "messages")
    assert text == "USER: <image>\nWhat is it? ASSISTANT: A cat. "
    assert [text[start:end] for start, end in spans] == ["A cat. "] and not template.odd
    asked = [{"role": "user", "content": "<image>What?"}]
    assert template.prompt(asked) == "USER: <image>\nWhat? ASSISTANT:"


@pytest.mark.slow
def test_digits_are_held_out_by_pairs_and_asked_about_alone_and_together(cache: Path) -> None:
    need_digits()
    config = compose([*GIVEN, "data=digit_questions", f"data.cache_dir={cache}", "data.validation_fraction=0.2"])[0]
    prepared: Any = prepare(config)
    assert prepared.too_long_samples == 0 and prepared.train_samples + prepared.held_out_samples == 3143
    shown = {}
    for split in ("train", "validation"):
        own, seen = prepared.documents(split), prepared.visual_index(split)
        offsets, pictures = seen.offsets, seen.pictures
        shown[split] = {int(one) for at in own for one in pictures[offsets[at] : offsets[at + 1]]}
        counts = set(np.diff(offsets)[own].tolist())
        assert counts == ({0, 1, 2} if split == "train" else {1, 2}), "what is held out is about pictures"
    assert not shown["train"] & shown["validation"] and len(shown["train"] | shown["validation"]) == 1796


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": said("<image>"), "images": ["p/dark/0.png", "p/dark/1.png"]}, "has 2 pictures, and places for 1"),
        ({"messages": said("<image><image>"), "image": "p/dark/0.png"}, "has 1 pictures, and places for 2"),
        ({"messages": said([PART])}, "has 0 pictures, and places for 1"),
        ({"messages": said("<image>"), "images": ["gone.png"]}, "there is no file"),
        ({"messages": said("<image>"), "images": ["https://x/y.png"]}, "save it to a file"),
        ({"messages": said("hm", "<image>"), "images": ["p/dark/0.png"]}, "has 1 pictures, and places for 0"),
    ],
)
def test_rows_that_do_not_hold_together_are_refused(tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigErrors, match=re.escape(expected)):
        preflight(chats(tmp_path, rows=[row]))


@pytest.mark.slow
def test_a_picture_that_cannot_be_used_stops_or_is_left_out(tmp_path: Path) -> None:
    config = chats(tmp_path, "data.validation_fraction=0")
    (tmp_path / "p" / "light" / "1.png").write_bytes(b"this is no picture\n")
    with pytest.raises(DataError, match=r"is no picture of a known format.*data\.on_bad_sample=skip"):
        prepare(config)
    prepared: Any = prepare(chats(tmp_path, "data.validation_fraction=0", "data.on_bad_sample=skip"))
    assert (prepared.train_samples, prepared.bad_samples) == (4, 1)


@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy_answers_and_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer, LlavaForConditionalGeneration

    from mgpu_pipe.cli.main import main
    from mgpu_pipe.inference.open import load_run
    from mgpu_pipe.inference.visual_prompts import PromptVisuals

    metrics = small_runs.run_moved(chats, tmp_path)
    second, picture = tmp_path / "second", str(tmp_path / "p" / "dark" / "0.png")
    assert main(["eval", str(second), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    said = float(printed.split("nats a token")[0].split()[-1])
    assert said == pytest.approx(metrics["val/loss"], abs=1e-6) and "exact_match" in printed
    answer = generated(second, capsys, "What is it?", Path(picture))
    wrong = ["generate", str(second), *GREEDY, "--prompt", "<image> or <image>?", "--image", picture]
    assert main(wrong) == 2 and "the prompt has 2 places for 1 pictures" in capsys.readouterr().err
    talk = io.StringIO(f"/image {tmp_path}/gone.png\n/image {picture}\nWhat is it?\nReally?\n/exit\n")
    monkeypatch.setattr("sys.stdin", talk)
    assert main(["chat", str(second), *GREEDY]) == 0
    spoken = capsys.readouterr()
    assert spoken.out.startswith(answer) and "gone.png: cannot be read" in spoken.err
    exported = exported_model(second, LlavaForConditionalGeneration, capsys)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": 16 * "<image>" + "What is it?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert int((ids == exported.config.image_token_id).sum()) == 16
    # transformers' own processor makes the same of a picture, and gives it as many places.
    from PIL import Image
    from transformers import LlavaProcessor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    processor = LlavaProcessor.from_pretrained(
        tmp_path / "out", image_processor=LlavaImageProcessorPil.from_pretrained(tmp_path / "out")
    )
    made = processor(images=Image.open(picture), text="<image>What?", return_tensors="pt")
    assert int((made["input_ids"] == exported.config.image_token_id).sum()) == 16
    visuals = PromptVisuals.from_files(load_run(second), [Path(picture)])
    assert visuals is not None and torch.allclose(visuals.pictures[0].values, made["pixel_values"].float(), atol=1e-5)
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    inputs = {"pixel_values": pixels, "input_ids": ids}
    check_logits(second, exported, **inputs)
    # The folder is trained on: its own token of a picture, its own template.
    check_trained_on(chats, tmp_path, metrics, 2, "data.chat_template=null", "strategy=fsdp")


def answered(composed: Any, folder: str, overrides: list[str], _: object) -> Any:
    """The metrics of a run, and what is shown of its model behind it."""
    from mgpu_pipe.inference.during_training import make_samples
    from mgpu_pipe.training.train import train

    config = composed(Path(folder).parent, *overrides)
    prepared: Any = prepare(config)
    result = train(config, RunPaths(Path(folder)), prepared)
    model: Any = result.model
    return result.summary["metrics"], make_samples(
        config, model, None, prepared, together=True, forward=result.sampling_forward
    )


@pytest.mark.slow
def test_the_stages_of_a_pipeline_answer_as_one_process_does(tmp_path: Path) -> None:
    """Micro-batches have different numbers of pictures, and one has none."""
    same = ("data.micro_batch_size=1", "data.shift=0")
    (single, expected), (metrics, shown) = (
        small_runs.run(chats, tmp_path / name, processes, f"strategy={name}", *same, trained=answered)
        for name, processes in (("single", 1), ("pp", 2))
    )
    for key in ("train/loss", "val/loss", "val/exact_match"):
        assert metrics[key] == pytest.approx(single[key], rel=1e-5)
    assert shown == expected and len(shown) == 2 and all(one["text"] for one in shown)


@pytest.mark.slow
def test_four_steps_of_both_stages(cache: Path, tmp_path: Path) -> None:
    """The second stage takes its weights from the first, whose towers stayed as they were."""
    need_digits()
    few = ("data.global_batch_size=4", "data.micro_batch_size=2", "data.validation_max_samples=8")
    first, *_ = four_steps(cache, tmp_path, "vlm_digits_stage1", *few)
    start = (f"checkpoint.init_from={first}", "run.starts_from=null")
    _, summary, _ = four_steps(cache, tmp_path, "vlm_digits", *start, *few)
    assert summary["model"]["class"] == "LlavaForConditionalGeneration"
    assert 0 <= summary["metrics"]["val/exact_match"] <= 1


def test_shipped_models_have_their_published_size() -> None:
    model = build_meta(compose(["model=llava15_7b"])[0].model, CLASS)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(7063.4, rel=1e-4)
