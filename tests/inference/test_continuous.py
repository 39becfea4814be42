"""Rows that enter and leave a batch. Oracle of greedy answers: transformers' own ``generate``, prompt by prompt; of the
work: its padded batches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgpu_pipe.inference.batch.continuous import Row, RowBatch, answer_rows, takes_rows
from mgpu_pipe.inference.sampling import RowDraws, Sampling, StopTexts
from mgpu_pipe.models.build import build_meta, materialise
from tests.models.tiny import tiny_model

END, MOST = 7, 24


def model_of(family: str) -> Any:
    model: Any = materialise(build_meta(tiny_model(family)), 3, "cpu").eval()
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():  # next tokens far from ties
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def prompts_of(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(8, 60, (length,), generator=generator).tolist() for length in lengths]


class Work:
    """Counts a model's forward passes, and the places of tokens that it computes in them."""

    def __init__(self, model: Any) -> None:
        self.passes = self.places = 0
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _: Any, __: Any, inputs: dict[str, Any]) -> None:
        self.passes += 1
        self.places += inputs["input_ids"].numel()


def rooms_of(count: int) -> list[int]:
    """Room for most answers is short, and long for every sixth."""
    return [MOST if number % 6 == 0 else 1 + number % 5 for number in range(count)]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "qwen3", "gpt_neox", "phi"])
def test_greedy_answers_are_those_one_at_a_time(family: str) -> None:
    model, prompts, rooms = model_of(family), prompts_of(30), rooms_of(30)
    assert takes_rows(model)
    given = {"do_sample": False, "eos_token_id": END, "pad_token_id": 0}
    with torch.no_grad():
        alone = [
            model.generate(torch.tensor([ids]), max_new_tokens=room, **given)[0, len(ids) :].tolist()
            for ids, room in zip(prompts, rooms, strict=True)
        ]
        rows = [Row(number, ids, rooms[number], torch.empty(0)) for number, ids in enumerate(prompts)]
        batch = RowBatch(model, Sampling(MOST, 0.0, None, None), [END], 0, torch.device("cpu"))
        done = list(answer_rows(batch, rows, 6))
    assert sorted(row.number for row in done) == list(range(30)) and [row.number for row in done] != list(range(30))
    for row in done:
        assert row.new + [END] * row.is_ended == alone[row.number]


def test_draws_are_those_of_padded_batches_and_take_fewer_passes() -> None:
    """Rows end by their own limits here, after one to five tokens, and each sixth after 24."""
    model, prompts, rooms = model_of("llama"), prompts_of(48), rooms_of(48)
    sampling = Sampling(MOST, 0.9, 20, 0.9)
    draws = RowDraws(sampling)

    def answered(batch_size: int) -> tuple[dict[int, list[int]], Work]:
        rows = [Row(number, ids, rooms[number], draws.numbers(number)) for number, ids in enumerate(prompts)]
        work = Work(model)
        with torch.no_grad():
            batch = RowBatch(model, sampling, [END], 0, torch.device("cpu"))
            return {row.number: row.new for row in answer_rows(batch, rows, batch_size)}, work

    alone, _ = answered(1)
    together, work = answered(8)
    assert together == alone
    padded = sum(max(rooms[start : start + 8]) for start in range(0, 48, 8))
    assert work.passes <= 0.75 * padded, (work.passes, padded)


@pytest.mark.parametrize(("min_p", "last"), [(None, 3), (0.2, 2), (0.5, 1), (0.9, 0)])
def test_min_p_keeps_tokens_of_that_share_of_the_likeliest(min_p: float | None, last: int) -> None:
    """The highest number draws the last token that is kept; transformers' own ``generate`` gets the setting too."""
    sampling = Sampling(1, 1.0, None, None, min_p)
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert RowDraws(sampling).choose(scores, [torch.tensor([1 - 1e-6], dtype=torch.float64)]).tolist() == [last]
    assert sampling.settings()["min_p"] == min_p


def test_a_stop_in_the_lead_of_a_chat_template_ends_no_answer() -> None:
    """A template may write a line's end before an answer, which the model then writes itself."""

    class Letters:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "".join(map(chr, ids))

    stops = StopTexts(Letters(), ["\n"], lead="\n")  # type: ignore[arg-type]
    for text, answer in (("\n", "\n"), ("\nab", "\nab"), ("\nab\nc", "\nab"), ("ab\nc", "ab"), ("\n\n", "\n")):
        assert stops.is_in([*map(ord, text)]) == (answer != text) and stops.cut(text) == answer


@pytest.mark.parametrize("family", ["t5", "mamba", "mistral"])
def test_caches_of_other_states_keep_padded_batches(family: str) -> None:
    """Mistral's tiny model has a sliding window, whose cache forgets."""
    fields = {"sliding_window": 8} if family == "mistral" else {}
    model_class = "AutoModelForSeq2SeqLM" if family == "t5" else "AutoModelForCausalLM"
    assert not takes_rows(materialise(build_meta(tiny_model(family, **fields), model_class), 3, "cpu"))
