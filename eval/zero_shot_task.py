"""What `zero_shot.py` classifies: rows with labels, and what each class is encoded from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from protocols import DataTable, DemoData, ProtocolRecipe, Rows, Subject, column_values, data_of, embedded
from pydantic import Field, PositiveInt

from mmcl.arrays import refuse_unknown
from mmcl.data import as_names, named_labels, refuse_missing_column, undecoded, value_bytes
from mmcl.zero_shot import prompts_by_class

DEMO_EXAMPLES = 8


class ZeroShotRecipe(ProtocolRecipe):
    """How to classify."""

    data: DataTable
    """The rows that are judged."""
    validation: DataTable | None = None
    """Rows of which the temperature is fitted, and examples are taken."""
    target: str = "text"
    """The modality that the classes stand for."""
    label: str | None = None
    """Column of each row's class; default: the target's."""
    classes: list[str] | dict[str, str] | None = None
    """Labels, or {label: name in prompts}; default: all that the rows have."""
    templates: list[str] | None = None
    """Texts with one place for the class's name; default: the name, or the raw value that is the label."""
    examples: PositiveInt | None = None
    """In place of templates: so many validation rows of a class stand for it, by their target values."""
    bins: PositiveInt = Field(default=15, le=1000)
    """Of the calibration error."""


@dataclass(frozen=True)
class Task:
    """Rows with labels, and what each class is encoded from."""

    dataset: str
    target: str
    prompts: dict[str, list]
    """{class: its prompts, as many for every class}."""
    rows: Rows
    labels: np.ndarray
    validation: Rows | None = None
    validation_labels: np.ndarray | None = None
    bins: int = 15


def example_prompts(dataset: Any, column: str, labels: Sequence[str], classes: Sequence[str], count: int) -> dict:
    """{class: the target's raw values in the first `count` distinct rows of the class}."""
    refuse_missing_column(dataset, column, "examples")
    names, data = named_labels(dataset, column), undecoded(dataset).select_columns([column])
    prompts: dict[str, dict[bytes, Any]] = {name: {} for name in classes}
    for row, label in enumerate(labels):
        if label in prompts and len(prompts[label]) < count:  # so that few rows are read
            (value,) = as_names([data[row][column]], names)
            if value is not None:
                prompts[label].setdefault(value_bytes(value), value)
    for name, found in prompts.items():
        if len(found) < count:
            raise ValueError(f"class {name!r} has {len(found)} distinct validation rows, fewer than examples = {count}")
    return {name: list(found.values()) for name, found in prompts.items()}


def class_prompts(recipe: ZeroShotRecipe, column: str, data: Any, values: list, validation: Any) -> dict[str, list]:
    """{label: prompts}, by the recipe; values: the labels of the rows that are judged, as they stand."""
    labels = recipe.label or column
    known = {str(value): value for value in values}
    listed = list(recipe.classes) if recipe.classes is not None else sorted(known)
    if recipe.examples is not None:
        if recipe.templates is not None:
            raise ValueError("templates and examples both say what stands for a class; leave one of them out")
        if validation is None:
            raise ValueError("examples are taken from validation rows: give [validation]")
        own = [str(value) for value in column_values(validation, labels, "label")]
        return example_prompts(validation, column, own, listed, recipe.examples)
    names = recipe.classes if isinstance(recipe.classes, Mapping) else {each: each for each in listed}
    if recipe.templates is None and labels == column and not isinstance(recipe.classes, Mapping):
        return {each: [known.get(each, each)] for each in listed}  # the raw value itself, which may be a number
    filled = prompts_by_class(list(names.values()), recipe.templates or ["{}"])
    return {label: filled[name] for label, name in names.items()}


def positions(values: Sequence[Any], classes: Sequence[str], what: str) -> np.ndarray:
    """(n,) which class each row has; ValueError names a row of another."""
    places = {name: place for place, name in enumerate(classes)}
    for row, value in enumerate(values):
        if str(value) not in places:
            raise ValueError(f"{what}: row {row} has the label {value!r}, which is none of the {len(classes)} classes")
    return np.array([places[str(value)] for value in values])


def task_of(recipe: ZeroShotRecipe, path: str, subject: Subject) -> Task:
    """Data, classes and labels of a user's recipe."""
    model, target = subject.model, recipe.target
    refuse_unknown((target,), model.modalities, "target")
    column = recipe.data.columns.get(target, target)
    parts = {"data": recipe.data} | ({"validation": recipe.validation} if recipe.validation else {})
    loaded = {name: data_of(path, part.source, part.split) for name, part in parts.items()}
    values = {name: column_values(data, recipe.label or column, f"label in {name}") for name, data in loaded.items()}
    prompts = class_prompts(recipe, column, loaded["data"], values["data"], loaded.get("validation"))
    others = [name for name in model.modalities if name != target]
    rows, labels = {}, {}
    for name, part in parts.items():
        refuse_unknown(part.columns, model.modalities, f"columns of {name}")
        labels[name] = positions(values[name], list(prompts), name)
        columns = {key: value for key, value in part.columns.items() if key != target}
        rows[name] = embedded(model, loaded[name], columns, others)
    return Task(
        recipe.name,
        target,
        prompts,
        rows["data"],
        labels["data"],
        rows.get("validation"),
        labels.get("validation"),
        recipe.bins,
    )


def demo_tasks(demo: DemoData, subject: Subject) -> list[Task]:
    """The word from image and sound; the spoken digit, given by clips, from image and word."""
    from mmcl.synthetic.digits import WORDS

    tasks = []
    test, validation = demo.test, demo.validation
    for target, column in (("text", "text"), ("audio", "audio_digit")):
        others = [name for name in subject.model.modalities if name != target]
        labels = [[str(value) for value in column_values(part, column, "label")] for part in (test, validation)]
        names = list(WORDS) if target == "text" else [str(digit) for digit in range(10)]
        prompts = {name: [name] for name in names}
        if target == "audio":
            prompts = example_prompts(validation, target, labels[1], names, DEMO_EXAMPLES)
        rows = [embedded(subject.model, part, None, others) for part in (test, validation)]
        places = [positions(each, names, target) for each in labels]
        tasks.append(Task("mmcl/digits", target, prompts, rows[0], places[0], rows[1], places[1]))
    return tasks
