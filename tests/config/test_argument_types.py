"""Arguments of callbacks, loggers and optimizers: what their annotations exclude is refused, and nothing else."""

from __future__ import annotations

import pytest

from mgpu_pipe.checks.values import relation_errors, value_errors
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.targets.build_target import wanted_instead
from mgpu_pipe.errors import BadInputError


def all_errors(config: RunConfig) -> list[BadInputError]:
    return [*value_errors(config), *relation_errors(config)]


STOPPING = ["callbacks=early_stopping", "trainer.val_every_n_steps=5", "trainer.accelerator=cpu"]


@pytest.mark.parametrize(
    ("annotation", "fitting", "others", "words"),
    [
        ("int", [3], ["3", 3.5, True, None, [3]], "a whole number"),
        ("float", [3, 0.5], ["x", False, None], "a number"),
        ("bool", [True], [1, "true"], "true or false"),
        ("str", ["x"], [1, None], "text"),
        ("Optional[int]", [None, 2], ["x"], "a whole number or null"),
        ("'Optional[str]'", [None, "x"], [2], "text or null"),
        ("int | None", [None, 2], ["x"], "a whole number or null"),
        ("typing.Union[bool, str]", [True, "x"], [2], "true or false or text"),
        ("Literal['min', 'max']", ["min"], ["mn", 1], "min or max"),
        ("tuple[float, float]", [[0.9, 0.95], (1, 2)], [[0.9], 0.9, ["a", "b"]], "a list of 2 values, [a,b]"),
        ("list[str]", [["a"], []], ["a", [1]], "a list of text"),
        ("dict[str, Any]", [{}], [[], "x"], "a mapping, {name: value}"),
        ("Union[float, Tensor]", [0.1, "anything"], [], ""),
        ("timedelta", [1, "x", None], [], ""),
        ("not python(", [1], [], ""),
    ],
)
def test_an_annotation_excludes_what_it_surely_excludes(
    annotation: str, fitting: list[object], others: list[object], words: str
) -> None:
    assert [wanted_instead(annotation, value) for value in fitting] == [None] * len(fitting)
    assert [wanted_instead(annotation, value) for value in others] == [words] * len(others)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([*STOPPING, "callbacks.early_stopping.patience=abc"], "early_stopping.patience=abc: use a whole number"),
        ([*STOPPING, "callbacks.early_stopping.patience=2.5"], "early_stopping.patience=2.5: use a whole number"),
        ([*STOPPING, "callbacks.early_stopping.verbose=2"], "early_stopping.verbose=2: use true or false"),
        ([*STOPPING, "callbacks.early_stopping.monitor=val/los"], "no such metric; did you mean val/loss?"),
        ([*STOPPING, "callbacks.early_stopping.monitor=train/loss"], "no such metric; did you mean val/loss?"),
        ([*STOPPING, "callbacks.early_stopping.mode=mn"], "early_stopping.mode=mn: did you mean min?"),
        (["callbacks=early_stopping"], "trainer.val_every_n_steps=null: callbacks.early_stopping reads evaluations"),
        ([*STOPPING, "trainer.max_steps=5"], "trainer.val_every_n_steps=5: callbacks.early_stopping reads"),
        (["optimizer.options.betas=[0.9]"], "optimizer.options.betas=[0.9]: use a list of 2 values"),
        (["optimizer.options.eps=small"], "optimizer.options.eps=small: use a number"),
        (["logger.tensorboard.max_queue=[1]", "logger.tensorboard.log_graph=7"], "log_graph=7: use true or false"),
    ],
)
def test_a_wrong_value_is_one_line(overrides: list[str], said: str) -> None:
    (error,) = all_errors(compose(overrides)[0])
    assert said in str(error)


def test_what_fits_is_taken() -> None:
    fitting = ["callbacks.early_stopping.patience=2", "callbacks.early_stopping.min_delta=0", "optimizer.options.eps=1"]
    assert all_errors(compose([*STOPPING, *fitting])[0]) == []


LIGHTNING = "pytorch_lightning.callbacks"


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        ("RichProgressBar", "use trainer.progress=bar"),
        ("TQDMProgressBar", "use trainer.progress=bar"),
        ("EMAWeightAveraging", "wants the whole model"),
        ("StochasticWeightAveraging,swa_lrs:1e-3", "wants the whole model"),
        ("ModelPruning,pruning_fn:l1_unstructured", "wants the whole model"),
        ("LearningRateFinder", "sweep the rate"),
        ("BatchSizeFinder", "use data.micro_batch_size"),
        ("GradientAccumulationScheduler,scheduling:{four:2}", "use data.micro_batch_size"),
        ("BackboneFinetuning", "use model.freeze"),
        ("ThroughputMonitor,batch_size_fn:len", "metrics.csv has"),
        ("ModelCheckpoint", "use checkpoint.every_n_steps"),
        ("LearningRateMonitor", "add logger=tensorboard"),
        ("DeviceStatsMonitor", "add logger=tensorboard"),
    ],
)
def test_a_callback_that_cannot_work_is_refused_with_what_to_use(callback: str, said: str) -> None:
    config, _ = compose(["logger=none", f"callbacks.mine={{_target_:{LIGHTNING}.{callback}}}"])
    [error] = all_errors(config)
    assert "callbacks.mine._target_=" in str(error) and said in str(error)


@pytest.mark.parametrize(
    "callback",
    ["LearningRateMonitor,logging_interval:step", "DeviceStatsMonitor", "LambdaCallback", "Timer,duration:{hours:1}"],
)
def test_a_callback_that_works_is_taken(callback: str) -> None:
    config, _ = compose(["logger=tensorboard", f"callbacks.mine={{_target_:{LIGHTNING}.{callback}}}"])
    assert not all_errors(config)


def test_steps_below_one_are_said_once() -> None:
    config, _ = compose(["trainer.max_steps=-1"])
    assert [str(error) for error in all_errors(config)] == ["trainer.max_steps=-1: use a number of at least 1"]


def test_an_argument_of_a_misspelt_leaf_leads_to_that_leaf() -> None:
    config, _ = compose([*STOPPING, "callbacks.early_stoping.patience=3"])
    said = "callbacks.early_stoping.patience=3: no such key; did you mean callbacks.early_stopping?"
    assert [str(error) for error in all_errors(config)] == [said]
