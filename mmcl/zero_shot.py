"""Zero-shot classification: the classes are items of one modality, the other modalities are the query."""

from collections.abc import Callable, Iterable, Mapping
from string import Formatter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mmcl.arrays import full_precision, refuse_unknown, same_length
from mmcl.modes import evaluating
from mmcl.values import as_embeddings, is_encoded

Template = str | Callable[[str], str]

PLAIN = ("{}",)
"""The class name itself."""


class ZeroShotClassifier:
    """Score inputs against class names, by the model's own score.

    The vector of a class is the mean over templates of the unit rows that the model encodes, normalised again. All of
    them are computed once, here, without gradient and with the model in eval mode (restored after).

    Args:
        model: a `MultimodalModel`.
        classes: distinct names; or {name: raw value or list of raw values} where the target takes something else than
            text (templates are then left out, and the mean runs over the listed values).
        templates: texts with one place for the class ("a photo of a {}", "a {name}"), or callables from name to text;
            one or several.
        target: the modality that the classes stand for.
        batch_size: rows encoded at once.
    Raises: ValueError for classes or templates that say nothing, KeyError for an unknown target.
    Source: Radford et al. 2021, section 3.1.4, for the ensemble of prompts.
    """

    def __init__(
        self,
        model: Any,
        classes: Any,
        templates: Any = PLAIN,
        target: str = "text",
        batch_size: int | None = None,
    ):
        refuse_unknown((target,), model.score.modalities, "target")
        prompts = prompts_by_class(classes, templates)
        self.model, self.target, self.batch_size = model, target, batch_size
        self.classes = tuple(prompts)
        self.class_vectors = encode_classes(model, prompts, target, batch_size)

    def scores(self, inputs: Any, present: Any = None, encoded: Any = None) -> Float[Tensor, "n classes"]:
        """The model's score of every row with every class, in eval mode and without gradient.

        Args:
            inputs: {modality: raw values, prepared tensors or embeddings of n rows}, some or all of the modalities but
                the target; those left out are absent (see `Score.query_vectors`).
            present: {modality: (n,) bool}, False where a row lacks the modality.
            encoded: whether inputs are embeddings; default: where they are unit rows of the score's width.
        Raises: KeyError for an unknown modality, or a score that cannot do without an absent one; ValueError where
            nothing, no row or the target is given.
        """
        self._check(inputs)
        score = self.model.score
        absent = tuple(name for name in score.modalities if name not in inputs and name != self.target)
        with evaluating(self.model):
            queries = {name: self._rows(name, values, encoded) for name, values in inputs.items()}
            if same_length(queries) == 0:
                raise ValueError(f"no row to classify: {list(inputs)} are empty")
            query = score.query_vectors(queries, present=present, absent=absent)
            items = score.item_vectors({self.target: self.class_vectors.to(query.device)})
            with full_precision(query.device):
                return query @ items.to(query.dtype).T

    def probabilities(self, inputs: Any, present: Any = None, encoded: Any = None) -> Float[Tensor, "n classes"]:
        """Softmax of `scores` over the classes: every class is as likely beforehand."""
        return self.scores(inputs, present, encoded).softmax(dim=1)

    def predict(self, inputs: Any, present: Any = None, encoded: Any = None) -> list[str]:
        """Name of the best class of each row; a tie goes to the class that was listed first."""
        return [self.classes[best] for best in self.scores(inputs, present, encoded).argmax(dim=1).tolist()]

    def _rows(self, name: str, values: Any, encoded: Any) -> Tensor:
        """(n, d) unit rows of raw values, or the embeddings themselves."""
        dim = self.model.score.dim
        if is_encoded(values, name, dim, self.model, encoded):
            return as_embeddings(values, name, dim).to(self.class_vectors.device)
        return self.model.encode({name: values}, batch_size=self.batch_size)[name]

    def _check(self, inputs: Any) -> None:
        others = [name for name in self.model.score.modalities if name != self.target]
        if not isinstance(inputs, Mapping) or not inputs:
            raise ValueError(f"inputs must be {{modality: values}} with some of {others}, got {type(inputs).__name__}")
        if self.target in inputs:
            raise ValueError(f"{self.target!r} is what the classes stand for; give some of {others} instead")
        refuse_unknown(inputs, others, "inputs")


def encode_classes(
    model: Any, prompts: Mapping[str, list], target: str, batch_size: int | None
) -> Float[Tensor, "classes d"]:
    """Unit vector of each class: the mean over its prompts' unit rows, normalised again."""
    flat = [prompt for each in prompts.values() for prompt in each]
    with evaluating(model):
        rows = model.encode({target: stacked(flat)}, batch_size=batch_size)[target]
    parts = rows.split([len(each) for each in prompts.values()])
    means = torch.stack([part.mean(dim=0) for part in parts])
    for name, norm in zip(prompts, means.norm(dim=1).tolist(), strict=True):
        if norm < 1e-6:
            raise ValueError(f"class {name!r}: the embeddings of its prompts cancel out, so it has no direction")
    return F.normalize(means, dim=1)


def prompts_by_class(classes: Any, templates: Any = PLAIN) -> dict[str, list]:
    """{class: what to encode for it}, in the order of the classes; see `ZeroShotClassifier` for both arguments."""
    if isinstance(classes, Mapping):
        check_names(list(classes))
        if templates != PLAIN:
            raise ValueError("templates make texts from class names; with a dict of raw values leave them out")
        prompts = {name: value if isinstance(value, list) else [value] for name, value in classes.items()}
        bare = [name for name, values in prompts.items() if not values]
        if bare:
            raise ValueError(f"class {bare[0]!r} has no raw value")
        return prompts
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        raise ValueError(f"classes must be a list of names or a dict, got {classes!r}")
    names = list(classes)
    check_names(names)
    fillers = [as_filler(template) for template in as_templates(templates)]
    return {name: [fill(name) for fill in fillers] for name in names}


def check_names(names: list) -> None:
    """At least one class; each a distinct, non-empty string."""
    if not names:
        raise ValueError("no classes given; name at least one")
    for position, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"class {position} must be a non-empty string, got {name!r}")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"class names must be distinct; given more than once: {repeated}")


def as_templates(templates: Any) -> list:
    """One template or several, as a list."""
    if isinstance(templates, str) or callable(templates):
        return [templates]
    if not isinstance(templates, Iterable):
        raise ValueError(f"templates must be texts or callables, got {templates!r}")
    listed = list(templates)
    if not listed:
        raise ValueError('no templates given; ("{}",) encodes the class name itself')
    return listed


def as_filler(template: Any) -> Callable[[str], str]:
    """The function from a class name to the text of one template."""
    fill = template if callable(template) else str_filler(template)

    def checked(name: str) -> str:
        text = fill(name)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"template {template!r} made {text!r} of class {name!r}; it must make a non-empty text")
        return text

    return checked


def str_filler(template: Any) -> Callable[[str], str]:
    """`template.format` with the class in its one field, however often and under whatever name that field stands."""
    if not isinstance(template, str):
        raise ValueError(f"a template is a text or a callable, got {template!r}")
    try:
        fields = [field for _, field, _, _ in Formatter().parse(template) if field is not None]
    except ValueError as fault:
        raise ValueError(f"template {template!r} is not a format string: {fault}") from fault
    if len(set(fields)) != 1:
        raise ValueError(f"template {template!r} needs exactly one place for the class, such as {{}}; it has {fields}")
    field = fields[0]
    if field not in ("", "0") and not field.isidentifier():
        raise ValueError(
            f"template {template!r}: the place for the class must be {{}} or a plain {{name}}, not {field!r}"
        )

    def fill(name: str) -> str:
        try:
            return template.format(*[name] * len(fields), **{field: name})
        except (ValueError, LookupError) as fault:
            raise ValueError(f"template {template!r} cannot be filled with class {name!r}: {fault}") from fault

    return fill


def stacked(values: list) -> Any:
    """Tensors of one shape as one tensor, anything else as it is."""
    if all(isinstance(value, Tensor) for value in values) and len({value.shape for value in values}) == 1:
        return torch.stack(values)
    return values
