"""The classes of labelled data: their names, and the order of their numbers. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.text.tokenizer import model_field
from mgpu_pipe.errors import ConfigError


def class_names(config: RunConfig, there: Collection[str]) -> list[str]:
    """Those that are given (``data.classes``, else a classifier that is trained on), else those that there are.

    Raises:
        ConfigError: classes that are not in the list, fewer than two, or not as many as ``model.config.num_labels``.
    """
    given, key = list(config.data.classes), "data.classes"
    if not given:
        given, key = _of_the_model(config), "model.config.id2label"
    if not given:
        given, key = sorted(there, key=in_order), "data.label_column"
    strange = sorted((name for name in there if class_number(name, given) is None), key=in_order)
    if strange:
        reason = f"the data has a class {strange[0]!r} besides"
        raise ConfigError(
            key, ",".join(given), "name every class by data.classes, in the order of their numbers", reason
        )
    if key == "data.label_column" and len(given) < 2:
        fix = "give samples of two classes or more, or name the classes by data.classes"
        raise ConfigError(key, config.data.label_column, fix, f"every sample has the class {', '.join(given)!r}")
    if len(given) < 2 or len(set(given)) < len(given):
        reason = "there are fewer than two classes, or one is named twice"
        raise ConfigError(key, ",".join(given), "name each class once by data.classes", reason)
    wanted = config.model.config.get("num_labels")
    if wanted is not None and wanted != len(given):
        reason = f"the data has {len(given)} classes"
        raise ConfigError("model.config.num_labels", wanted, "leave it out", reason)
    return given


def class_number(name: str, classes: Sequence[str]) -> int | None:
    """The number of a class that is called by its name, or is that number itself."""
    if name in classes:
        return classes.index(name)
    return int(name) if name.isascii() and name.isdigit() and int(name) < len(classes) else None


def _of_the_model(config: RunConfig) -> list[str]:
    """The classes that the model's configuration names; none where it only numbers them."""
    found = model_field(config.model, "id2label")
    if not isinstance(found, Mapping):
        return []
    names = [str(name) for _, name in sorted(found.items(), key=lambda entry: int(entry[0]))]
    return [] if names == [f"LABEL_{number}" for number in range(len(names))] else names


def in_order(name: str) -> tuple[bool, int, str]:
    """Numbers by their value, before words."""
    number = name.removeprefix("-")
    is_number = number.isascii() and number.isdigit()
    return not is_number, int(name) if is_number else 0, name
