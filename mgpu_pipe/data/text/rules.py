"""Questions and answers made by rules: sums, dates, units, lists, and what nobody can know. No torch.

``data=rule_chat`` asks and answers in conversations. ``data=rule_facts`` holds the same facts as plain sentences, and
the questions without answers. Both hold out the same operands. The held-out conversations also ask in wordings of their
own, so nothing that they ask about, and no way in which they ask, is trained on.
"""

from __future__ import annotations

import calendar
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from mgpu_pipe.data.order import GlobalOrder
from mgpu_pipe.data.text.documents import Document

HELD, TRAINED = "held out 1", "trained on 1"
"""Keys of documents. All of one key stay on one side, and the one with the smaller hash is held out."""
_KEY = 0x5EED
HELD_SHARE = 0.1
QUESTIONS_HELD = 40
"""Of each rule, at most."""
CONVERSATIONS = 16_000
UNANSWERED = 3
"""Every so many questions stand among the sentences."""
SECOND_QUESTION = 5
"""Every so many conversations have a second question."""
NOUNS = (
    "apple pear plum lemon bread milk cheese egg chair table lamp clock shirt shoe hat coat cat dog horse bird stone "
    "tree river cloud"
)
PEOPLE = "Anna Ben Clara David Emma Frank Grace Henry Ida Jack Kate Leo Mary Nick Olga Paul Rosa Sam Tina Victor"
SECRETS = ("password", "phone number", "address", "age", "salary", "birthday", "bank account", "plan for tomorrow")
UNITS = (
    ("metres", "centimetres", 100),
    ("kilometres", "metres", 1000),
    ("kilograms", "grams", 1000),
    ("litres", "millilitres", 1000),
    ("centimetres", "millimetres", 10),
)
_MONTHS = [(name, calendar.monthrange(2023, number)[1]) for number, name in enumerate(calendar.month_name) if number]
DATES = [f"{day} {name}" for name, days in _MONTHS for day in range(1, days + 1)]


@dataclass(frozen=True)
class Rule:
    """One kind of question.

    Attributes:
        answer: a sentence that says the fact by itself, with the operands' names in braces.
        operands: what is asked about; each a mapping for the texts.
        wordings: of questions.
        held_wordings: of the held-out ones.
        always: the operands that cannot be guessed from the others, by their place; never held out.
        weight: how often each fact stands among the sentences: some take more reading than others.
    """

    name: str
    answer: str
    operands: Sequence[dict[str, object]]
    wordings: Sequence[str]
    held_wordings: Sequence[str]
    always: frozenset[int] = field(default_factory=frozenset)
    weight: int = 1

    def sides(self) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
        """The operands that are trained on, and those that are held out, mixed."""
        order = GlobalOrder(_KEY, len(self.operands)).indices(0, len(self.operands)).tolist()
        held = [place for place in order[: int(HELD_SHARE * len(order))] if place not in self.always]
        trained = set(order).difference(held)
        return [self.operands[at] for at in order if at in trained], [self.operands[at] for at in held]


def _dates(step: int) -> tuple[list[dict[str, object]], frozenset[int]]:
    moved = [{"d": date, "x": DATES[(at + step) % len(DATES)]} for at, date in enumerate(DATES)]
    borders = frozenset(at for at, date in enumerate(DATES) if moved[at]["x"].split()[1] != date.split()[1])
    return [dict[str, object](one) for one in moved], borders


def _lists() -> list[dict[str, object]]:
    every = [one for one in product(NOUNS.split(), repeat=3) if len(set(one)) == 3]
    chosen = [every[at] for at in GlobalOrder(_KEY, len(every)).indices(0, 600).tolist()]
    return [{"l": ", ".join(one), "last": one[2], "r": ", ".join(reversed(one))} for one in chosen]


def rules() -> list[Rule]:
    """All of them."""
    after, before, lists = _dates(1), _dates(-1), _lists()
    numbers = list(product(range(10, 100), range(2, 10)))
    return [
        Rule(
            "sum",
            "{a} plus {b} is {x}.",
            [{"a": a, "b": b, "x": a + b} for a, b in numbers],
            (
                "What is {a} plus {b}?",
                "Add {a} and {b}.",
                "How much is {a} plus {b}?",
                "Please add {a} and {b}.",
                "{a} plus {b} makes what?",
                "Can you tell me {a} plus {b}?",
                "I have {a} coins and get {b} more. How many coins do I have?",
            ),
            ("Please tell me how much {a} plus {b} is.", "Can you add {a} and {b}?"),
            weight=3,
        ),
        Rule(
            "difference",
            "{a} minus {b} is {x}.",
            [{"a": a, "b": b, "x": a - b} for a, b in numbers],
            (
                "What is {a} minus {b}?",
                "Take {b} from {a}.",
                "How much is {a} minus {b}?",
                "Please take {b} from {a}.",
                "{a} minus {b} makes what?",
                "Can you tell me {a} minus {b}?",
                "I have {a} coins and lose {b}. How many coins do I have?",
            ),
            ("Please tell me how much {a} minus {b} is.", "Can you take {b} from {a}?"),
            weight=3,
        ),
        Rule(
            "day after",
            "The day after {d} is {x}.",
            after[0],
            (
                "What is the day after {d}?",
                "Which day comes after {d}?",
                "Today is {d}. What is tomorrow's date?",
                "Can you tell me the day after {d}?",
                "If today is {d}, what date is tomorrow?",
                "It is {d}. Tell me tomorrow's date.",
                "Can you tell me tomorrow's date if today is {d}?",
            ),
            ("Please tell me which day comes after {d}.", "Today is {d}. Can you tell me tomorrow's date?"),
            after[1],
            weight=2,
        ),
        Rule(
            "day before",
            "The day before {d} is {x}.",
            before[0],
            (
                "What is the day before {d}?",
                "Which day comes before {d}?",
                "Today is {d}. What is yesterday's date?",
                "Can you tell me the day before {d}?",
                "If today is {d}, what date was yesterday?",
                "It is {d}. Tell me yesterday's date.",
                "Can you tell me yesterday's date if today is {d}?",
            ),
            ("Please tell me which day comes before {d}.", "Today is {d}. Can you tell me yesterday's date?"),
            before[1],
            weight=2,
        ),
        Rule(
            "units",
            "{n} {large} are {x} {small}.",
            [
                {"n": n, "large": large, "small": small, "x": n * times}
                for n in range(2, 100)
                for large, small, times in UNITS
            ],
            (
                "How many {small} are {n} {large}?",
                "What are {n} {large} in {small}?",
                "Convert {n} {large} to {small}.",
                "Can you tell me how many {small} {n} {large} are?",
                "I need {n} {large} in {small}.",
            ),
            ("Please convert {n} {large} to {small}.", "Please tell me how many {small} are {n} {large}."),
            weight=2,
        ),
        Rule(
            "last of a list",
            "The last of {l} is {last}.",
            lists,
            (
                "Which is the last of {l}?",
                "What comes last in {l}?",
                "Tell me the last of these: {l}.",
                "From {l}, give me the last one.",
                "Can you tell me what is last in {l}?",
            ),
            ("Please give me the last of {l}.", "Can you tell me the last of these: {l}?"),
        ),
        Rule(
            "list backwards",
            "{l} backwards is {r}.",
            lists,
            (
                "Say {l} backwards.",
                "What is {l} backwards?",
                "Turn this list round: {l}.",
                "Can you say {l} backwards?",
                "Please turn this list round: {l}.",
            ),
            ("Please say {l} backwards.", "Can you turn this list round: {l}?"),
        ),
        Rule(
            "refusal",
            "I do not know the {s} of {p}.",
            [{"s": secret, "p": person} for person in PEOPLE.split() for secret in SECRETS],
            (
                "What is the {s} of {p}?",
                "Tell me the {s} of {p}.",
                "Do you know the {s} of {p}?",
                "I need the {s} of {p}.",
                "Give me the {s} of {p}, please.",
            ),
            ("Can you tell me the {s} of {p}?", "Please give me the {s} of {p}."),
        ),
    ]


def rule_documents(source: str) -> Iterator[Document]:
    """The documents of ``source``: of ``rule_chat`` JSON lines, of ``rule_facts`` sentences."""
    for number, (text, key) in enumerate(_chat() if source == "rule_chat" else _facts()):
        yield Document(text, f"data.source={source}: {number}", 1, key=key)


def held_out_conversations() -> Iterator[Document]:
    """The held-out documents of ``rule_chat``."""
    return (document for document in rule_documents("rule_chat") if document.key == HELD)


def overlap() -> dict[str, int]:
    """How many held-out questions and answers, which name the operands, and wordings are trained on, facts included."""
    asked: dict[str, set[str]] = {HELD: set(), TRAINED: set()}
    for source in ("rule_chat", "rule_facts"):
        for document in rule_documents(source):
            is_chat = document.text.startswith("{")
            texts = [one["content"] for one in json.loads(document.text)["messages"]] if is_chat else [document.text]
            asked[str(document.key)].update(texts)
    wordings = [(set(rule.wordings), set(rule.held_wordings)) for rule in rules()]
    return {
        "questions and answers": len(asked[HELD] & asked[TRAINED]),
        "wordings": sum(len(trained & held) for trained, held in wordings),
    }


def _chat() -> Iterator[tuple[str, str]]:
    known = [(rule, *rule.sides()) for rule in rules()]
    for number in range(CONVERSATIONS):
        pairs = []
        for turn in range(2 if number % SECOND_QUESTION == 0 else 1):
            rule, trained, _ = known[(number + number // len(known) * turn) % len(known)]
            pairs.append(_asked(rule.wordings, rule.answer, trained, number // len(known) + 7 * turn))
        yield _conversation(pairs), TRAINED
    for rule, _, held in known:
        for at in range(min(QUESTIONS_HELD, len(held))):
            yield _conversation([_asked(rule.held_wordings, rule.answer, held, at)]), HELD


def _facts() -> Iterator[tuple[str, str]]:
    for rule in rules():
        trained, held = rule.sides()
        for at in range(len(trained)):
            question, answer = _asked(rule.wordings, rule.answer, trained, at)
            for _ in range(rule.weight):
                yield answer, TRAINED
            if at % UNANSWERED == 0:
                yield question, TRAINED
        for one in held:
            yield rule.answer.format(**one), HELD


def _asked(wordings: Sequence[str], answer: str, operands: Sequence[dict[str, object]], at: int) -> tuple[str, str]:
    """Question and answer number ``at``; the next time round, operands are asked about in the next wording."""
    chosen = operands[at % len(operands)]
    return wordings[(at + at // len(operands)) % len(wordings)].format(**chosen), answer.format(**chosen)


def _conversation(pairs: Sequence[tuple[str, str]]) -> str:
    messages = []
    for question, answer in pairs:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages})
