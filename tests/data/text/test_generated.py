"""Numbers in words, and questions of rules. Oracles: examples by hand; Python's own arithmetic and calendar."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.accuracy.demos import overlap
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import NumbersConfig
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.text import rules as made
from mgpu_pipe.data.text.generated import draw_numbers, in_words, number_pairs
from mgpu_pipe.data.text.heldout_split import document_hash, held_out
from mgpu_pipe.data.text.rules import HELD, NOUNS, TRAINED, UNITS, rule_documents, rules
from mgpu_pipe.data.text.token_store import TokenStore


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (99, "ninety-nine"),
        (100, "one hundred"),
        (805, "eight hundred five"),
        (1000, "one thousand"),
        (20_017, "twenty thousand seventeen"),
        (999_999, "nine hundred ninety-nine thousand nine hundred ninety-nine"),
        (3_000_100, "three million one hundred"),
    ],
)
def test_numbers_have_their_words(number: int, words: str) -> None:
    assert in_words(number) == words


def test_every_number_has_words_of_its_own() -> None:
    assert len({in_words(number) for number in range(10_000)}) == 10_000


def test_numbers_are_drawn_once_in_every_length() -> None:
    drawn = list(draw_numbers(NumbersConfig(count=2000, digits=4)))
    assert len(drawn) == len(set(drawn)) == 2000
    lengths = [sum(len(str(number)) == digits for number in drawn) for digits in range(1, 5)]
    assert lengths == [10, 90, 900, 1000], "short numbers are all there"
    assert drawn == list(draw_numbers(NumbersConfig(count=2000, digits=4)))


def test_a_number_gives_a_pair_each_way() -> None:
    pairs = list(number_pairs(NumbersConfig(count=3, digits=1)))
    for there, back in zip(pairs[::2], pairs[1::2], strict=True):
        assert there[0] == back[0] == there[1] == back[2] and there[2] == back[1] == in_words(int(there[0]))


def is_true(sentence: str) -> bool:
    if found := re.fullmatch(r"(\d+) (plus|minus) (\d+) is (\d+)\.", sentence):
        a, operation, b, x = found.groups()
        return int(x) == (int(a) + int(b) if operation == "plus" else int(a) - int(b))
    if found := re.fullmatch(r"The day (after|before) (.*) is (.*)\.", sentence):
        there, here = (datetime.datetime.strptime(f"{text} 2023", "%d %B %Y") for text in found.groups()[:0:-1])
        days = (there - here).days % 365
        return days == (1 if found[1] == "after" else 364)
    if found := re.fullmatch(r"(\d+) (\w+) are (\d+) (\w+)\.", sentence):
        times = {(large, small): times for large, small, times in UNITS}
        return int(found[3]) == int(found[1]) * times[found[2], found[4]]
    if found := re.fullmatch(r"The last of (.*) is (.*)\.", sentence):
        return found[1].split(", ")[-1] == found[2]
    if found := re.fullmatch(r"(.*) backwards is (.*)\.", sentence):
        return found[1].split(", ") == found[2].split(", ")[::-1]
    return sentence.startswith("I do not know the ")


def test_every_answer_is_true_and_nothing_held_out_is_trained_on() -> None:
    asked = 0
    for document in rule_documents("rule_chat"):
        messages = json.loads(document.text)["messages"]
        assert all(is_true(one["content"]) for one in messages[1::2])
        asked += document.key == HELD
    facts = [document.text for document in rule_documents("rule_facts") if document.text[-1] == "."]
    assert sum(map(is_true, (text for text in facts if " is " in text or " are " in text))) > 5000
    assert overlap() == {"questions and answers": 0, "wordings": 0} and asked > 250
    assert len(set(NOUNS.split())) == len(NOUNS.split())
    for rule in rules():
        trained, held = rule.sides()
        assert len(trained) + len(held) == len(rule.operands) and not [one for one in held if one in trained] and held


@pytest.mark.slow
def test_both_sources_hold_out_what_their_keys_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "CONVERSATIONS", 800)
    assert document_hash(HELD) < document_hash(TRAINED)
    sizes = ["model=llama_tiny", "model.config.vocab_size=300", "data.chat_template=chatml", "data.tokenize_workers=1"]
    for source in ("rule_chat", "rule_facts"):
        keys = np.array([document.key == HELD for document in rule_documents(source)])
        for fraction in (0.02, 0.05):
            hashes = np.array([document_hash(HELD if held else TRAINED) for held in keys])
            assert (held_out(hashes, fraction) == keys).all()
    config = compose([*sizes, "data=rule_chat", f"data.cache_dir={tmp_path}"])[0]
    prepared = prepare(config)
    assert prepared.validation is not None  # type: ignore[attr-defined]
    assert prepared.validation.documents == sum(document.key == HELD for document in rule_documents("rule_chat"))  # type: ignore[attr-defined]
    assert (TokenStore.open(prepared.folder).hashes == document_hash(HELD)).sum() == prepared.validation.documents  # type: ignore[attr-defined]
