"""``mgpu-pipe plan``: the best layouts of a configuration on given hardware, predicted; starts nothing."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.errors import EXIT_OK, BadInputError, ConfigError, ConfigErrors, print_line, print_text

if TYPE_CHECKING:
    from mgpu_pipe.checks.plan_layouts import Losers, PlannedRun, TracedLayout
    from mgpu_pipe.config.hydra.compose import Composition

DESCRIPTION = """\
Predict step time, memory and cost of layouts of a configuration, and print
the best ones with their overrides. Starts nothing. plan.hardware=h100,h200 and
plan.gpus=8,16 compare; --json prints times and memory by part. --trace runs a
step of the best layout, or of a strategy that you type, on fake tensors, and
prints its memory by phase. --html FILE writes a page with pictures of the plans."""
TRACE, JSON, HTML = "--trace", "--json", "--html"
GROWTH = (1, 2, 4)
"""Multiples of the GPUs that the page compares, where plan.gpus names no others."""
LISTS = ("plan.hardware", "plan.gpus")
"""Keys whose values may be typed with commas alone."""
REPLACED = ("data.micro_batch_size", "trainer.devices", "trainer.num_nodes", "trainer.accelerator")
"""Keys besides ``strategy`` that a plan sets."""
NUMERIC = ("", "gpus", "rows", "step", "tokens/s", "MFU", "memory", "$ a billion tokens")
SPARE = ("rows", "checkpointing", "largest overhead")
BILLION, KILO, HOUR = 1e9, 1e3, 3600.0
SMALL_STEP = 1024
"""Tokens a GPU and step, below which no layout keeps a GPU busy."""


def plan(words: list[str]) -> int:
    """``mgpu-pipe plan [OVERRIDES] [--json] [--trace] [--html FILE]``."""
    from mgpu_pipe.launch.compositions import compose_and_run

    as_json, traces = JSON in words, TRACE in words
    words, page = _without_file(words)
    if traces and page is not None:
        raise BadInputError(f"{HTML}: the page shows the whole plan; leave {TRACE} out")

    def job(composition: Composition) -> int:
        from mgpu_pipe.checks.check_model import check_model
        from mgpu_pipe.checks.check_sizes import range_errors
        from mgpu_pipe.checks.layout_candidates import with_typed_schedule
        from mgpu_pipe.checks.plan_layouts import plan_layouts, planned_layout, refuse_untraceable, typed_layout

        errors = composition.errors or range_errors(composition.config)
        if errors:
            raise ConfigErrors(errors)
        check_model(composition.config.model, composition.config.data, composition.config.objective)
        config = composition.config
        keys = with_typed_schedule(config.plan, config.strategy, composition.overrides)
        composition.config = replace(config, plan=keys)
        if traces and _chooses_layout(composition):
            return _trace(composition, typed_layout(composition.config), composition.overrides, as_json)
        if traces:
            refuse_untraceable(composition.config)
        plans, losers = plan_layouts(composition.config)
        typed = [word for word in composition.overrides if not _is_replaced(word)]
        plans = _with_all_words(plans, [*composition.flags, *typed])
        if traces:
            return _trace(composition, planned_layout(plans[0]), typed, as_json)
        if page is not None:
            _write_page(composition, plans, Path(page))
        if as_json:
            print_text(json.dumps({"plans": [_plain(each) for each in plans], **_counts(losers)}, indent=2))
        else:
            words = [*composition.flags, *typed, *_hardware_word(composition, plans[0])]
            _print(plans, losers, words, _total_tokens(composition, plans[0]))
        return EXIT_OK

    return compose_and_run("plan", DESCRIPTION, [_as_list(word) for word in words if word not in (JSON, TRACE)], job)


def _without_file(words: list[str]) -> tuple[list[str], str | None]:
    """The words without ``--html FILE``, and the file; BadInputError without a name."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == HTML:
            rest = words[index + 1 :] if equals else words[index + 2 :]
            file = value if equals else "".join(words[index + 1 : index + 2])
            if not file or (not equals and file.startswith("-")):
                raise BadInputError(f"{HTML}: no file; write {HTML} plan.html")
            if "=" in file and not file.endswith(".html"):
                raise BadInputError(f"{HTML} {file}: is an override, no file; write {HTML} plan.html {file}")
            return [*words[:index], *rest], file
    return words, None


def _write_page(composition: Composition, plans: Sequence[PlannedRun], out: Path) -> None:
    """Write the page of the plans, with the best layout of each of several numbers of GPUs."""
    from mgpu_pipe.checks.plan_layouts import plan_layouts
    from mgpu_pipe.report.plan_page import write_plan_page

    config, best = composition.config, plans[0]
    worlds = sorted(set(config.plan.gpus)) if len(config.plan.gpus) > 1 else [best.gpus * times for times in GROWTH]
    hardware = _hardware_word(composition, best)
    names = [word.partition("=")[2] for word in hardware]
    small = replace(config, plan=replace(config.plan, gpus=[best.gpus], hardware=names, rank_by="memory"))
    listed = {tuple(each.overrides) for each in plans}
    smaller = [each for each in plan_layouts(small)[0] if tuple(each.overrides) not in listed]
    larger = []
    for gpus in worlds:
        try:
            best_of, _ = plan_layouts(replace(config, plan=replace(config.plan, gpus=[gpus], hardware=names, rows=1)))
        except ConfigError:  # this number fits no layout, or does not divide the batch
            continue
        larger.append(best_of[0])
    command = shlex.join(["mgpu-pipe", "plan", *composition.flags, *composition.overrides])
    try:
        write_plan_page(plans, smaller, larger, command, out)
    except OSError as error:
        raise BadInputError(f"{HTML} {out}: cannot be written ({error.strerror}); choose another file") from error
    print_line(f"page: {out}", file=sys.stderr)


def _chooses_layout(composition: Composition) -> bool:
    """Whether the command or its experiment chooses a strategy, other than by the planner."""
    from mgpu_pipe.config.hydra.command_line import compose_one, parse

    strategy = composition.config.strategy
    typed = any(word.lstrip("+~").startswith("strategy") for word in composition.overrides)
    return strategy.name != "auto" and (typed or strategy != compose_one(parse(composition.flags)).config.strategy)


def _trace(composition: Composition, layout: TracedLayout, typed: Sequence[str], as_json: bool) -> int:
    """Trace ranks of a layout and print them."""
    from mgpu_pipe.config.resolve import world_size
    from mgpu_pipe.launch.process_job import trace_ranks
    from mgpu_pipe.models.fields import resolved_fields
    from mgpu_pipe.report.measurements import print_traces

    words, kind = [*composition.flags, *typed, *layout.words], resolved_fields(layout.config.model)["model_type"]
    if not as_json:
        print_line(f"traced on fake tensors: {shlex.join([*typed, *layout.words])}", flush=True)
    traces = trace_ranks(layout.ranks, world_size(layout.config.trainer, layout.config.strategy), words, str(kind))
    if as_json:
        formulas = (
            None if layout.plain is None else {"tensors": layout.plain.tensor_bytes, "terms": dict(layout.plain.terms)}
        )
        print_text(json.dumps({"overrides": [*typed, *layout.words], "traces": traces, "formulas": formulas}, indent=2))
    else:
        print_traces(traces, layout.plain, layout.memory)
    return EXIT_OK


def _is_replaced(word: str) -> bool:
    """Whether a plan replaces what this override sets."""
    from mgpu_pipe.checks.plan_layouts import LAYOUT_KEYS

    key = word.lstrip("+~").partition("=")[0]
    whole = ("strategy", "strategy.name", "strategy.pipeline", "strategy.deepspeed")
    keys = (*whole, *(f"strategy.{name}" for name in LAYOUT_KEYS))
    return key in (*REPLACED, *keys) or key.startswith("plan.")


def _with_all_words(plans: Sequence[PlannedRun], words: Sequence[str]) -> list[PlannedRun]:
    """The plans with all overrides that they need besides ``words``, whose experiment may set keys of a strategy."""
    from mgpu_pipe.checks.plan_layouts import words_against
    from mgpu_pipe.config.hydra.command_line import compose_one, parse

    strategies = {each.overrides[0] for each in plans}
    bases = {strategy: compose_one(parse([*words, strategy])).config.strategy for strategy in sorted(strategies)}
    whole = []
    for each in plans:
        end = len(each.layout.overrides)
        others = words_against(bases[each.overrides[0]], each)
        whole.append(replace(each, overrides=[*each.overrides[:end], *others, *each.overrides[end:]]))
    return whole


def _hardware_word(composition: Composition, best: PlannedRun) -> list[str]:
    """The override that names the best plan's hardware as it was typed; none if it is this machine's."""
    names = composition.config.plan.hardware
    return [f"plan.hardware={name}" for name in names if Path(name).stem == best.profile.name][:1]


def _as_list(word: str) -> str:
    """``plan.gpus=8,16`` as ``plan.gpus=[8,16]``."""
    key, equals, value = word.partition("=")
    return f"{key}=[{value}]" if key in LISTS and equals and not value.startswith(("[", "$")) else word


def _total_tokens(composition: Composition, best: PlannedRun) -> float | None:
    """Tokens of the whole training, if known."""
    config = composition.config
    if config.plan.tokens is not None or config.trainer.max_steps is None:
        return config.plan.tokens
    return config.trainer.max_steps * best.tokens_per_step


def _print(plans: Sequence[PlannedRun], losers: Losers, typed: Sequence[str], tokens: float | None) -> None:
    _print_table(plans)
    print_line()
    for number, each in enumerate(plans, start=1):
        print_line(f"{number}: {shlex.join(each.overrides)}")
    print_line()
    _print_losers(losers)
    best = plans[0]
    if best.memory.assumes:
        print_line(f"assumed: {best.memory.assumes}")
    if best.profile.accelerator != "cpu" and best.tokens_per_step < SMALL_STEP * best.gpus:
        print_line(
            f"note: a step of {best.tokens_per_step:,.0f} tokens is too small for {best.gpus:,} GPUs: "
            "raise data.global_batch_size or data.seq_len"
        )
    if tokens is not None:
        _print_cost(best, tokens)
    print_line(f"check it: mgpu-pipe check {shlex.join([*typed, *best.overrides])}")


def _print_table(plans: Sequence[PlannedRun]) -> None:
    from mgpu_pipe.report.columns import print_columns
    from mgpu_pipe.report.numbers import count, figure, seconds

    several = len({each.profile.name for each in plans}) > 1
    worlds = len({each.gpus for each in plans}) > 1
    names = ("", "hardware", "gpus", "layout", "rows", "checkpointing", "step", "tokens/s", "MFU", "memory")
    cells = []
    for number, each in enumerate(plans, start=1):
        lost, share = each.largest_loss
        cost = each.dollars_per_token * BILLION
        cells.append(
            [
                str(number),
                each.profile.name if several else "",
                f"{each.gpus:,}" if worlds else "",
                each.layout.name,
                str(each.layout.micro_batch_size),
                each.layout.checkpointing,
                seconds(each.seconds),
                count(each.tokens_per_second),
                f"{100 * each.utilisation:.1f}%",
                f"{each.memory.likely / 2**30:.1f} GiB{' (tight)' if each.is_tight else ''}",
                figure(cost, 3) if cost == cost else "",
                f"{lost.replace('_', ' ')} {100 * share:.0f}%",
            ]
        )
    columns = (*names, "$ a billion tokens", "largest overhead")
    print_columns(columns, cells, NUMERIC, below=(), spare=SPARE)


def _print_losers(losers: Losers) -> None:
    """Print how many layouts do not fit or are refused."""
    on_host = f" ({losers.too_large_for_host:,} of them the host's memory)" if losers.too_large_for_host else ""
    print_line(
        f"{losers.tried:,} layouts: {losers.too_large:,} do not fit{on_host}, {losers.refused:,} are refused by a "
        f"check, the others are slower or alike"
    )
    for error in losers.errors:
        print_line(f"no plan: {error}")


def _print_cost(best: PlannedRun, tokens: float) -> None:
    """Print time, GPU hours, price and energy of training ``tokens`` tokens by the fastest plan."""
    from mgpu_pipe.report.numbers import count, duration, figure

    def amount(number: float) -> str:
        return figure(number, 3) if number < KILO else count(number)

    wall_s = tokens / best.tokens_per_second
    hours = best.gpus * wall_s / HOUR
    price = "" if best.dollars_per_hour is None else f", {figure(hours * best.dollars_per_hour, 4)} dollars"
    energy = f", {amount(hours * best.profile.watts / KILO)} kWh of GPUs" if best.profile.watts else ""
    print_line(f"{count(tokens)} tokens by 1: {duration(wall_s)}, {amount(hours)} GPU hours{price}{energy}")


def _counts(losers: Losers) -> dict[str, Any]:
    counts = {"layouts": losers.tried, "do_not_fit": losers.too_large, "refused": losers.refused}
    counts["do_not_fit_host"] = losers.too_large_for_host
    return {**counts, "no_plan": [str(error) for error in losers.errors]}


def _plain(each: PlannedRun) -> dict[str, Any]:
    """A plan for JSON."""
    cost = each.dollars_per_token
    return {
        "hardware": each.profile.name,
        "gpus": each.gpus,
        "overrides": list(each.overrides),
        "seconds_per_step": each.seconds,
        "seconds_by_part": dict(each.parts),
        "tokens_per_second": each.tokens_per_second,
        "utilisation": each.utilisation,
        "memory_bytes": {
            "low": each.memory.low,
            "likely": each.memory.likely,
            "high": each.memory.high,
            "of_gpu": each.profile.memory_bytes,
            "terms": dict(each.memory.terms),
        },
        "dollars_per_token": cost if cost == cost else None,
    }


VERB = Verb("the best layouts on given hardware: time, memory and cost", plan, composes=True)
