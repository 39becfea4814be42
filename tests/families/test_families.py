"""Every causal language model of transformers in its variants: the oracle is transformers' own model, one document at
a time in one process. ``benchmarks/results/families.json`` holds what was found (``python -m tests.families.sweep``).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from mgpu_pipe.models.fields import model_types
from tests.families.cells import variants
from tests.families.sweep import BAD, TABLE, cells_of, quiet
from tests.support.sampling import one_in

pytestmark = pytest.mark.slow

SAMPLED = {
    "apertus": "as shipped",  # a parameter in the activation between column- and row-parallel layers
    "cohere": "use_qk_norm=true",
    "falcon": "alibi=true",
    "glm4_moe": "use_qk_norm=true",
    "phi3": "rope_parameters=longrope",
    "mamba": "as shipped",
    "bert": "as shipped",  # refused: its tokens see later ones
    "inkling2_text": "as shipped",  # cuts its logits after the head
}


def table() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))["families"]
    return content


def outcomes(cells: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {
        name: {axis: part["is"] for axis, part in cell.items() if isinstance(part, dict)}
        for name, cell in cells.items()
    }


def test_the_table_has_every_family_and_nothing_wrong() -> None:
    found = table()
    assert sorted(found) == model_types()
    bad = {
        f"{family} [{name}] {axis}": kind
        for family, cells in found.items()
        for name, parts in outcomes(cells).items()
        for axis, kind in parts.items()
        if kind in BAD
    }
    assert bad == {}


@pytest.mark.parametrize("family", one_in(2, sorted(SAMPLED)))
def test_a_variant_is_what_the_table_says(family: str) -> None:
    wanted = SAMPLED[family]
    (variant,) = [one for one in variants(family) if one.name == wanted]
    with quiet():
        found = outcomes(cells_of([variant]))
    assert found[wanted] == outcomes(table()[family])[wanted]
    assert not set(BAD) & set(found[wanted].values())


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", model_types())
def test_every_variant_is_what_the_table_says(family: str) -> None:
    from tests.families.sweep import try_family

    compiled = any("compile" in cell for cell in table()[family].values())
    with quiet():
        cells = try_family(family, compiled=compiled)
    assert outcomes(cells) == outcomes(table()[family]), cells
