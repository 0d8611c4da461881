"""What backbones take for n rows: a tensor of n rows, or a dict of them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from mmcl.arrays import as_tensor

Inputs = Any
"""A tensor of n rows, or {field: tensor of n rows}."""


def input_length(inputs: Inputs) -> int:
    """The number of rows that prepared inputs hold."""
    return len(inputs) if isinstance(inputs, Tensor) else len(next(iter(inputs.values())))


def map_inputs(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """`function` of the tensor, or of each tensor of the dict; other fields stay as they are."""
    if isinstance(inputs, Mapping):
        return {key: function(value) if isinstance(value, Tensor) else value for key, value in inputs.items()}
    return function(inputs)


def take_rows(inputs: Inputs, rows: Any) -> Inputs:
    """Some rows of prepared inputs: a slice, or a tensor of positions."""
    return map_inputs(lambda values: values[rows], inputs)


def is_prepared(values: Any) -> bool:
    """Whether these are inputs of a backbone already: a tensor, or a dict of tensors."""
    if isinstance(values, Mapping):
        return bool(values) and all(isinstance(value, Tensor) for value in values.values())
    return isinstance(values, Tensor)


def numbers(values: Any) -> Tensor:
    """Rows of numbers as a tensor: floats as float32, integers as they are."""
    try:
        array = np.asarray(values)
    except ValueError:  # ragged rows
        array = np.empty(0, object)
    if array.dtype.kind not in "fiub":
        raise ValueError("an encoder without a method `prepare` takes tensors or arrays of numbers, one row each")
    return as_tensor(array.astype(np.float32) if array.dtype.kind == "f" else array)
