"""mgpu_pipe: one Hydra configuration, one reproducible multi-GPU run.

From Python, with the command line's words as a list::

    import mgpu_pipe

    mgpu_pipe.check(["model=llama_tiny", "strategy=ddp", "trainer.devices=2"])
    run = mgpu_pipe.train(["model=llama_tiny", "trainer.max_steps=20"])
    run.metrics["train/loss"], run.generate("def ")

See :mod:`mgpu_pipe.api`; nothing of it is imported before it is asked for.
"""

__version__ = "0.1.0"
__all__ = ["Comparison", "Plan", "Run", "check", "compare", "compose", "open_run", "train"]

TYPE_CHECKING = False  # the working folder may still be looked in: nothing is imported here
if TYPE_CHECKING:
    from typing import Any

    from mgpu_pipe.api import Comparison, Plan, Run, check, compare, compose, open_run, train


def __getattr__(name: str) -> "Any":
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("mgpu_pipe.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
