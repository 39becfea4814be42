"""What ``--help`` says: the program's verbs, and what those that compose a configuration take."""

from __future__ import annotations

VERB_LINES = {
    "train": "train; also what overrides without a verb do",
    "check": "say what would run, or what is wrong with it; start nothing",
    "verify": "prove that the configuration computes what one plain process does",
    "eval": "held-out loss and perplexity of a run",
    "generate": "continue prompts",
    "export": "write a Hugging Face folder",
    "import": "read another program's weights",
    "checkpoints": "list, check, compare and prune checkpoints",
    "report": "rebuild a run's report, or compare runs",
    "ls": "the groups and their options",
    "schema": "every key, its type and meaning, as a JSON schema",
    "version": "the version of this program",
}

COMPOSING = {
    "train": "Train a model: compose a configuration, check it, and start its processes.",
    "check": "Compose and check a configuration, and print what would run. Starts nothing.",
    "verify": "Run a small copy of the configuration on its topology, as CPU processes, and\n"
    "in one plain process; compare loss, gradients and weights. Exit code 1 where a\n"
    "bound is broken.",
}
"""The verbs that take a whole configuration."""

PROGRAM_HELP = """\
usage: mgpu-pipe [VERB] [OVERRIDES]

One Hydra configuration, one reproducible multi-GPU training run.

start with:
  mgpu-pipe experiment=quickstart                   train a small model
  mgpu-pipe check strategy=fsdp trainer.devices=4   see what a run would be
  mgpu-pipe ls                                      see what there is to choose

verbs:
{verbs}

mgpu-pipe VERB --help tells what a verb takes.
Tab completion in bash: eval "$(mgpu-pipe -sc install=bash)"
"""

COMPOSING_HELP = """\
usage: mgpu-pipe {usage} [OVERRIDES] [OPTIONS]

{description}

overrides:
  GROUP=OPTION         choose an option, e.g. model=llama_tiny strategy=fsdp
                       (mgpu-pipe ls lists them)
  KEY=VALUE            set a key, e.g. optimizer.lr=3e-4 trainer.max_steps=20
                       (mgpu-pipe schema explains them)

options:
  -m, --multirun       once for every combination of values, e.g. seed=1,2
  -cd, --config-dir DIR
                       a further folder of configurations
  -cn, --config-name NAME
                       another primary configuration than config
  -cp, --config-path DIR
                       a folder in the place of the shipped configurations
  -c, --cfg job        print the composed configuration, and do nothing else;
                       with --resolve: interpolations resolved, with
                       -p, --package KEY: that section
  -i, --info [WHAT]    print how it is composed: defaults, searchpath, plugins
  -sc, --shell-completion
                       install=bash prints what sets up tab completion
  --hydra-help         Hydra's own help
  -h, --help           this help
"""


def program_help() -> str:
    width = max(map(len, VERB_LINES))
    return PROGRAM_HELP.format(verbs="\n".join(f"  {verb:<{width}}  {line}" for verb, line in VERB_LINES.items()))


def composing_help(verb: str) -> str:
    """Of one of ``COMPOSING``."""
    return COMPOSING_HELP.format(usage="[train]" if verb == "train" else verb, description=COMPOSING[verb])
