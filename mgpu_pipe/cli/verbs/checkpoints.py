"""``mgpu-pipe checkpoints``: lists, checks, compares and prunes. Exit code 1 means damage or a difference."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from mgpu_pipe.checkpoint import inventory, layout
from mgpu_pipe.checkpoint.layout import Step
from mgpu_pipe.checkpoint.selection import best, followed_steps, steps_to_keep
from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.arguments import VerbParser, count, non_negative, parse, positive_int
from mgpu_pipe.config.objective import higher_is_better
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import CheckpointConfig
from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, BadInputError, CheckpointError, RunFolderError, one_line, print_line
from mgpu_pipe.runs.latest import ROOT_KEY, named_or_newest, split_root
from mgpu_pipe.runs.lock import RunLock
from mgpu_pipe.system.local_files import exists, expand_home

PROGRAM = "mgpu-pipe checkpoints"
FOLDER_HELP = "run's or step's folder; default: the newest run with a checkpoint below run.root=<folder> (outputs/)"
NOT_COMPARED = ("metrics", "config_hash", "format_version")
"""Entries of state.json that are irrelevant when comparing checkpoints."""


def checkpoints(words: list[str]) -> int:
    """``mgpu-pipe checkpoints [list|check|compare|prune] [FOLDER] ...``; the action may also follow the folder.

    Returns:
        0; 1 if a checkpoint is damaged or two checkpoints differ.

    Raises:
        BadInputError: a wrong argument or folder.
    """
    words, root = split_root(words)
    if len(words) > 1 and words[0] not in ACTIONS and words[1] in ACTIONS:
        words = [words[1], words[0], *words[2:]]
    if not words or (words[0] not in ACTIONS and words[0] not in ("-h", "--help")):
        meant = {"delete": "prune"}.get(words[0]) or nearest(words[0], ACTIONS) if words else None
        if meant and not exists(Path(words[0])):
            raise BadInputError(f"{PROGRAM} {words[0]}: no such action or folder; did you mean {meant}?")
        words = ["list", *words]
    arguments = parse(_parser(), words)
    if arguments is None:
        return EXIT_OK
    if arguments.action == "compare" and root is not None:
        raise BadInputError(f"{PROGRAM} compare {ROOT_KEY}={root}: takes two folders; leave {ROOT_KEY} out")
    arguments.root = root
    return ACTIONS[arguments.action](arguments)


def _parser() -> argparse.ArgumentParser:
    parser = VerbParser(prog=PROGRAM, description="Look after the checkpoints of a run.")
    actions = parser.add_subparsers(dest="action", required=True, parser_class=VerbParser)
    listing = actions.add_parser("list", help="every step: when, how large, saved by what, whole or damaged")
    check = actions.add_parser("check", help="name what is damaged; exit code 1 where anything is")
    check.add_argument("--full", action="store_true", help="read every byte: the SHA-256 of every chunk")
    compare = actions.add_parser("compare", help="tensors and configuration that differ; exit code 1 where tensors do")
    compare.add_argument("first", type=Path, help="run's folder (its newest whole step) or step's folder")
    compare.add_argument("second", type=Path)
    compare.add_argument("--weights", action="store_true", help="leave the optimizer's state out")
    compare.add_argument(
        "--tolerance",
        type=non_negative,
        default=0.0,
        metavar="X",
        help="relative difference of a tensor that still counts as the same",
    )
    prune = actions.add_parser("prune", help="show which steps would go, and with --yes delete them")
    prune.add_argument("--keep-last", type=positive_int, required=True, metavar="N", help="newest whole steps kept")
    prune.add_argument("--keep-every", type=positive_int, metavar="K", help="multiples of this are kept too")
    prune.add_argument("--keep-best", type=count, metavar="N", help="best steps kept too; default: as many as the run")
    prune.add_argument("--yes", action="store_true", help="delete")
    for action in (listing, check, prune):
        action.add_argument("folder", nargs="?", type=Path, help=FOLDER_HELP)
    return parser


def _list(arguments: argparse.Namespace) -> int:
    from mgpu_pipe.report.run_tables import checkpoints_table, print_lines, relative_to_cwd

    folder = named_or_newest(arguments.folder, arguments.root, saved=True)
    root, folders = inventory.steps_under(folder)
    steps = [inventory.inspect_step(step, path, "size") for step, path in folders.items()]
    settings = _settings(steps)
    resumed = next((step_.step for step_ in reversed(steps) if step_.whole and not step_.ruined), None)
    resumed = resumed if resumed is not None else next((step_.step for step_ in reversed(steps) if step_.whole), None)
    if settings.on_corruption == "stop" and not steps[-1].whole:
        resumed = None
    checkpoints_table(steps, resumed, _reasons_to_keep(steps, settings))
    remarks = [f"* taken by checkpoint.resume=auto, {root}"] if resumed is not None else []
    if resumed is None:
        remarks.append(f"checkpoint.resume=auto takes none of them, {root}")
    if len(folders) > 1 or root.name == "checkpoints":
        remarks += [f"{relative_to_cwd(path)}: unfinished, taken by nothing" for path in inventory.leftovers(root)]
    print_lines("", *remarks)
    return _report_damage(steps)


def _check(arguments: argparse.Namespace) -> int:
    from mgpu_pipe.report.run_tables import print_lines, relative_to_cwd

    _, folders = inventory.steps_under(named_or_newest(arguments.folder, arguments.root, saved=True))
    steps = []
    for step, path in folders.items():
        entry = inventory.inspect_step(step, path, "full" if arguments.full else "size")
        steps.append(entry)
        files = f"{entry.nbytes:,} bytes {'read' if arguments.full else 'in files of the right sizes'}"
        state = f"whole, {files}" if entry.whole else f"damaged in {len(entry.faults)} place(s)"
        print_lines(f"{relative_to_cwd(path)}: {state}")
    if not arguments.full:
        print_lines("sizes and manifests only; --full reads every byte")
    return _report_damage(steps)


def _report_damage(steps: Sequence[Step]) -> int:
    """Print every fault on stderr; returns the exit code."""
    for step in steps:
        for fault in step.faults:
            print_line(f"damaged: {one_line(fault)}", file=sys.stderr)
    return EXIT_OK if all(step.whole for step in steps) else EXIT_FAILURE


def _compare(arguments: argparse.Namespace) -> int:
    from mgpu_pipe.checkpoint.compare import compare_tensors
    from mgpu_pipe.report.run_tables import comparison_table, differences_table, print_lines, relative_to_cwd

    pair = [_step_of(arguments.first), _step_of(arguments.second)]
    for number, step in zip(("first ", "second"), pair, strict=True):
        print_lines(f"{number}  {relative_to_cwd(step.path)}")
    kinds = ("model",) if arguments.weights else layout.KINDS
    comparison = compare_tensors(pair[0].path, pair[1].path, kinds)
    differing = [step for step in comparison.differing if not step.relative <= arguments.tolerance]
    comparison.equal += len(comparison.differing) - len(differing)
    comparison.differing = differing
    states = [{key: value for key, value in step.state.items() if key not in NOT_COMPARED} for step in pair]
    differences = [*inventory.differences(*states), *inventory.differences(pair[0].config, pair[1].config)]
    if differences:
        print_lines("")
        differences_table(differences)
    print_lines("")
    comparison_table(comparison)
    within = f" within {arguments.tolerance:g}" if arguments.tolerance else ""
    print_lines(f"{comparison.equal} tensors are equal{within}, {len(differing) + len(comparison.unlike)} differ")
    return EXIT_OK if comparison.is_same else EXIT_FAILURE


def _step_of(folder: Path) -> Step:
    """The step in ``folder``, or the newest whole step of the run in ``folder``."""
    _, folders = inventory.steps_under(folder)
    for step, path in reversed(folders.items()):
        entry = inventory.inspect_step(step, path, "size")
        if entry.whole:
            return entry
    raise CheckpointError(f"{folder}: none of its checkpoints is whole; see {PROGRAM} check {folder}")


def _prune(arguments: argparse.Namespace) -> int:
    from mgpu_pipe.report.run_tables import checkpoints_table, print_lines

    folder = named_or_newest(arguments.folder, arguments.root, saved=True)
    root, folders = inventory.steps_under(folder)
    if expand_home(folder) in folders.values():
        raise RunFolderError(f"{folder}: is one step; give the run's folder")
    with _run_lock(root) if arguments.yes else nullcontext():
        steps = _with_newest_proved(folders)
        if not any(step.whole for step in steps):
            raise CheckpointError(f"{root}: none of its checkpoints is whole, so none is deleted")
        settings = _settings(steps)
        settings.keep_last, settings.keep_every = arguments.keep_last, arguments.keep_every
        settings.keep_best = settings.keep_best if arguments.keep_best is None else arguments.keep_best
        retained = _reasons_to_keep(steps, settings)
        to_delete = [step for step in steps if step.whole and not step.ruined and step.step not in retained]
        checkpoints_table(steps, None, {**retained, **{step.step: "goes" for step in to_delete}})
        if arguments.yes:
            for step in to_delete:
                _delete(root, step)
    size = sum(step.nbytes for step in to_delete)
    numbers = ", ".join(str(step.step) for step in to_delete) or "none"
    print_lines("", f"{'deleted' if arguments.yes else 'would delete'}: {numbers} ({size:,} bytes)")
    if to_delete and not arguments.yes:
        print_lines("nothing was deleted yet; add --yes")
    return _report_damage(steps)


def _with_newest_proved(folders: dict[int, Path]) -> list[Step]:
    """All steps, ascending; reads every byte of the two newest whole steps, because pruning relies on them."""
    steps: list[Step] = []
    proved = 0
    for step, path in reversed(folders.items()):
        entry = inventory.inspect_step(step, path, "size" if proved == 2 else "full")
        proved += entry.whole and not entry.ruined
        steps.append(entry)
    return steps[::-1]


def _delete(root: Path, step: Step) -> None:
    try:
        layout.delete(root, step.step)
    except OSError as error:
        raise RunFolderError(
            f"{step.path}: cannot be deleted ({error.strerror}); check the folder's permissions"
        ) from error


def _run_lock(root: Path) -> AbstractContextManager[object]:
    """Lock of the run with these checkpoints: a running run deletes by its retention settings."""
    run = RunPaths(root.parent)
    return RunLock(run.lock, wait_s=0) if root.name == "checkpoints" and exists(run.config) else nullcontext()


def _settings(steps: Sequence[Step]) -> CheckpointConfig:
    """Checkpoint settings of the newest step; defaults for unreadable settings."""
    settings = CheckpointConfig()
    read = next((step.config.get("checkpoint") for step in reversed(steps) if step.config), None)
    for name in ("keep_last", "keep_every", "keep_best", "best_metric", "on_corruption"):
        if isinstance(read, Mapping) and isinstance(read.get(name), (int, str)):
            setattr(settings, name, read[name])
    return settings


def _reasons_to_keep(steps: Sequence[Step], settings: CheckpointConfig) -> Mapping[int, str]:
    usable = [step for step in steps if step.whole and not step.ruined]
    proved = followed_steps([step.step for step in usable])
    values = {step.step: step.metric(settings.best_metric) for step in usable if step.step in proved}
    config = next((step.config for step in reversed(steps) if step.config), {})
    ranked = best(values, settings.keep_best, higher_is_better(config, settings.best_metric))
    return steps_to_keep([step.step for step in usable], settings.keep_last, settings.keep_every, ranked)


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "check": _check,
    "compare": _compare,
    "prune": _prune,
}

VERB = Verb("list, check, compare and prune checkpoints", checkpoints, first_words=lambda: list(ACTIONS))
