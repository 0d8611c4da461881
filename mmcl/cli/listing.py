"""mmcl list"""

import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal

import typer

from mmcl.cli.common import JsonOption, show

NOT_IN_RECIPES = {"load_weights", "score", "embeddings", "groups", "generator", "gather"}
"""Arguments that the program gives from elsewhere, or that mean nothing in a recipe."""
OF_THE_ENCODER = {"encoder", "width", "size"}
"""Arguments of a method that a recipe's other tables give."""

Table = Literal["encoders", "losses", "methods", "scores", "recipes"]


def list_names(
    table: Annotated[Table, typer.Argument(help="Which names to show.")],
    as_json: bool = JsonOption,
) -> None:
    """Show the names that recipes and functions take, with their options.

    Examples:

        mmcl list encoders

        mmcl list recipes --json
    """
    rows = TABLES[table]()
    lines = [line for name, row in rows.items() for line in described(name, row)]
    show(rows, as_json, lines)


def described(name: str, row: dict[str, Any]) -> list[str]:
    """A name, what it is, its options with their defaults, and what they mean."""
    options = [f"    {option} = {default}" for option, default in row["options"].items()]
    return [f"{name}: {row['about']}", *options, *(f"    {line}" for line in row.get("meaning", [])), ""]


def function_row(function: Any, hidden: Collection[str] = ()) -> dict[str, Any]:
    """First line of the docstring, {option: default}, and the rest of the docstring."""
    parameters = [
        p for p in inspect.signature(function).parameters.values() if p.name not in {*NOT_IN_RECIPES, *hidden}
    ]
    options = {p.name: "(required)" if p.default is p.empty else repr(p.default) for p in parameters}
    about, *meaning = (inspect.getdoc(function) or "").splitlines()
    return {"about": about, "options": options, "meaning": meaning[1:]}


def encoders() -> dict[str, Any]:
    from mmcl.encoders import ENCODERS

    return {name: function_row(function) for name, function in ENCODERS.items()}


def losses() -> dict[str, Any]:
    from mmcl.losses import TUPLE_LOSSES

    return {name: function_row(function) for name, function in TUPLE_LOSSES.items()}


def methods() -> dict[str, Any]:
    from mmcl.methods import METHODS

    return {name: function_row(kind, OF_THE_ENCODER) for name, kind in METHODS.items()}


def scores() -> dict[str, Any]:
    from mmcl.scores import SCORES

    return {name: function_row(kind) for name, kind in SCORES.items()}


def recipes() -> dict[str, Any]:
    from mmcl.recipes import RECIPES

    return {name: {"about": kind.__doc__, "options": recipe_keys(kind)} for name, kind in RECIPES.items()}


def recipe_keys(kind: Any, prefix: str = "") -> dict[str, str]:
    """{key: default and meaning}, tables inside included."""
    keys: dict[str, str] = {}
    for name, field in kind.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            keys |= recipe_keys(field.annotation, f"{prefix}{name}.")
            continue
        default = "(required)" if field.is_required() else repr(field.get_default(call_default_factory=True))
        keys[prefix + name] = f"{default}    {field.description}"
    return keys


TABLES: dict[str, Callable[[], dict[str, Any]]] = {
    "encoders": encoders,
    "losses": losses,
    "methods": methods,
    "scores": scores,
    "recipes": recipes,
}
