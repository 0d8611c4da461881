"""Settings checked once, at the edge: unknown keys are errors that list the known ones."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

Model = TypeVar("Model", bound="Settings")


class Settings(BaseModel):
    """Base of all settings: frozen, and nothing beyond its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def checked(kind: type[Model], values: Mapping[str, Any], where: str) -> Model:
    """`kind(**values)`; ValueError says in one line each what is wrong, and which keys there are."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise ValueError("\n".join(describe(fault, kind, where) for fault in error.errors())) from None


def describe(fault: Mapping[str, Any], kind: type[BaseModel], where: str) -> str:
    """One fault that pydantic found, in the words of the file."""
    place = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = sorted(field_names(kind, fault["loc"][:-1]))
        return f"{where}: unknown key {place!r}; the keys there are {known}"
    if fault["type"] == "missing":
        return f"{where}: key {place!r} is missing"
    return f"{where}: {place} = {fault.get('input')!r}: {fault['msg']}"


def field_names(kind: Any, path: tuple[Any, ...]) -> list[str]:
    """The fields of the model at `path` inside `kind`."""
    for part in path:
        field = kind.model_fields.get(part) if hasattr(kind, "model_fields") else None
        options = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        kind = next((option for option in options if hasattr(option, "model_fields")), None)
    return list(kind.model_fields) if kind is not None else []
