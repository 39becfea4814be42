"""``mgpu-pipe checkpoints``: lists, checks, compares and prunes. Exit code 1: damage, or a difference, was found."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from mgpu_pipe.checkpoint import inventory, layout
from mgpu_pipe.checkpoint.retention import best, followed, kept
from mgpu_pipe.checkpoint.step import Step
from mgpu_pipe.commands import Verb
from mgpu_pipe.config.arguments import VerbParser, count, non_negative, parse, positive_int
from mgpu_pipe.config.eval_tasks import higher_is_better
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import CheckpointConfig
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, BadInputError, CheckpointError, RunFolderError, one_line
from mgpu_pipe.runs.lock import RunLock
from mgpu_pipe.runs.newest import ROOT_KEY, named_or_newest, split_root

PROGRAM = "mgpu-pipe checkpoints"
FOLDER_HELP = "run's or step's folder; default: the newest run with a checkpoint below run.root=<folder> (outputs/)"
NOT_COMPARED = ("metrics", "config_hash", "format_version")
"""Entries of state.json that say nothing about how two checkpoints differ."""


def checkpoints(words: list[str]) -> int:
    """``mgpu-pipe checkpoints [list|check|compare|prune] [FOLDER] ...``; the action may also follow the folder.

    Returns:
        0; 1 where damage was found or two checkpoints differ.

    Raises:
        BadInputError: a wrong argument or folder.
    """
    words, root = split_root(words)
    if len(words) > 1 and words[0] not in ACTIONS and words[1] in ACTIONS:
        words = [words[1], words[0], *words[2:]]
    if not words or (words[0] not in ACTIONS and words[0] not in ("-h", "--help")):
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
    from mgpu_pipe.report.checkpoint_tables import checkpoints_table, lines
    from mgpu_pipe.report.tables import relative_to_cwd

    folder = named_or_newest(arguments.folder, arguments.root, saved=True)
    root, folders = inventory.steps_under(folder)
    steps = [inventory.inspect_step(step, path, "size") for step, path in folders.items()]
    settings = _settings(steps)
    taken = next((one.step for one in reversed(steps) if one.whole and not one.ruined), None)
    taken = taken if taken is not None else next((one.step for one in reversed(steps) if one.whole), None)
    if settings.on_corruption == "stop" and not steps[-1].whole:
        taken = None
    checkpoints_table(steps, taken, _kept(steps, settings))
    remarks = [f"* taken by checkpoint.resume=auto, {root}"] if taken is not None else []
    if taken is None:
        remarks.append(f"checkpoint.resume=auto takes none of them, {root}")
    if len(folders) > 1 or root.name == "checkpoints":
        remarks += [f"{relative_to_cwd(path)}: unfinished, taken by nothing" for path in inventory.leftovers(root)]
    lines("", *remarks)
    return _report_damage(steps)


def _check(arguments: argparse.Namespace) -> int:
    from mgpu_pipe.report.checkpoint_tables import lines
    from mgpu_pipe.report.tables import relative_to_cwd

    _, folders = inventory.steps_under(named_or_newest(arguments.folder, arguments.root, saved=True))
    steps = []
    for step, path in folders.items():
        one = inventory.inspect_step(step, path, "full" if arguments.full else "size")
        steps.append(one)
        files = f"{one.nbytes:,} bytes {'read' if arguments.full else 'in files of the right sizes'}"
        lines(
            f"{relative_to_cwd(path)}: {f'whole, {files}' if one.whole else f'damaged in {len(one.faults)} place(s)'}"
        )
    if not arguments.full:
        lines("sizes and manifests only; --full reads every byte")
    return _report_damage(steps)


def _report_damage(steps: Sequence[Step]) -> int:
    """Name every fault on stderr; the exit code."""
    for one in steps:
        for fault in one.faults:
            print("damaged:", one_line(fault), file=sys.stderr)
    return EXIT_OK if all(one.whole for one in steps) else EXIT_FAILURE


def _compare(arguments: argparse.Namespace) -> int:
    from mgpu_pipe.checkpoint.compare import compare_tensors
    from mgpu_pipe.report.checkpoint_tables import comparison_table, differences_table, lines
    from mgpu_pipe.report.tables import relative_to_cwd

    pair = [_one_step(arguments.first), _one_step(arguments.second)]
    for number, one in zip(("first ", "second"), pair, strict=True):
        lines(f"{number}  {relative_to_cwd(one.path)}")
    kinds = ("model",) if arguments.weights else layout.KINDS
    comparison = compare_tensors(pair[0].path, pair[1].path, kinds)
    apart = [one for one in comparison.differing if not one.relative <= arguments.tolerance]
    comparison.equal += len(comparison.differing) - len(apart)
    comparison.differing = apart
    states = [{key: value for key, value in one.state.items() if key not in NOT_COMPARED} for one in pair]
    differences = [*inventory.differences(*states), *inventory.differences(pair[0].config, pair[1].config)]
    if differences:
        lines("")
        differences_table(differences)
    lines("")
    comparison_table(comparison)
    within = f" within {arguments.tolerance:g}" if arguments.tolerance else ""
    lines(f"{comparison.equal} tensors are equal{within}, {len(apart) + len(comparison.unlike)} differ")
    return EXIT_OK if comparison.same else EXIT_FAILURE


def _one_step(folder: Path) -> Step:
    """The step that is named, or the newest whole one of a run."""
    _, folders = inventory.steps_under(folder)
    for step, path in reversed(folders.items()):
        one = inventory.inspect_step(step, path, "size")
        if one.whole:
            return one
    raise CheckpointError(f"{folder}: none of its checkpoints is whole; see {PROGRAM} check {folder}")


def _prune(arguments: argparse.Namespace) -> int:
    from mgpu_pipe.report.checkpoint_tables import checkpoints_table, lines

    folder = named_or_newest(arguments.folder, arguments.root, saved=True)
    root, folders = inventory.steps_under(folder)
    if folder.expanduser() in folders.values():
        raise RunFolderError(f"{folder}: is one step; give the run's folder")
    with _held(root) if arguments.yes else nullcontext():
        steps = _with_newest_proved(folders)
        if not any(one.whole for one in steps):
            raise CheckpointError(f"{root}: none of its checkpoints is whole, so none is deleted")
        settings = _settings(steps)
        settings.keep_last, settings.keep_every = arguments.keep_last, arguments.keep_every
        settings.keep_best = settings.keep_best if arguments.keep_best is None else arguments.keep_best
        staying = _kept(steps, settings)
        doomed = [one for one in steps if one.whole and not one.ruined and one.step not in staying]
        checkpoints_table(steps, None, {**staying, **{one.step: "goes" for one in doomed}})
        if arguments.yes:
            for one in doomed:
                _delete(root, one)
    size = sum(one.nbytes for one in doomed)
    numbers = ", ".join(str(one.step) for one in doomed) or "none"
    lines("", f"{'deleted' if arguments.yes else 'would delete'}: {numbers} ({size:,} bytes)")
    if doomed and not arguments.yes:
        lines("nothing was deleted yet; add --yes")
    return _report_damage(steps)


def _with_newest_proved(folders: dict[int, Path]) -> list[Step]:
    """All steps, ascending; the newest that count as whole have had every byte read, for the others may go for them:
    the newest, and the one before it, which a finite step followed.
    """
    steps: list[Step] = []
    proved = 0
    for step, path in reversed(folders.items()):
        one = inventory.inspect_step(step, path, "size" if proved == 2 else "full")
        proved += one.whole and not one.ruined
        steps.append(one)
    return steps[::-1]


def _delete(root: Path, one: Step) -> None:
    try:
        layout.delete(root, one.step)
    except OSError as error:
        raise RunFolderError(
            f"{one.path}: cannot be deleted ({error.strerror}); see to the folder's permissions"
        ) from error


def _held(root: Path) -> AbstractContextManager[object]:
    """The lock of the run whose checkpoints these are: a living run deletes by its own retention."""
    run = RunPaths(root.parent)
    return RunLock(run.lock, wait_s=0) if root.name == "checkpoints" and run.config.exists() else nullcontext()


def _settings(steps: Sequence[Step]) -> CheckpointConfig:
    """The checkpoint settings under which the newest step was saved; the defaults where they cannot be read."""
    settings = CheckpointConfig()
    read = next((one.config.get("checkpoint") for one in reversed(steps) if one.config), None)
    for name in ("keep_last", "keep_every", "keep_best", "best_metric", "on_corruption"):
        if isinstance(read, Mapping) and isinstance(read.get(name), (int, str)):
            setattr(settings, name, read[name])
    return settings


def _kept(steps: Sequence[Step], settings: CheckpointConfig) -> Mapping[int, str]:
    usable = [one for one in steps if one.whole and not one.ruined]
    proved = followed([one.step for one in usable])
    values = {one.step: one.metric(settings.best_metric) for one in usable if one.step in proved}
    config = next((one.config for one in reversed(steps) if one.config), {})
    ranked = best(values, settings.keep_best, higher_is_better(config, settings.best_metric))
    return kept([one.step for one in usable], settings.keep_last, settings.keep_every, ranked)


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "check": _check,
    "compare": _compare,
    "prune": _prune,
}

VERB = Verb("list, check, compare and prune checkpoints", checkpoints, first_words=lambda: list(ACTIONS))
