"""An encoder: raw values -> prepared tensors -> backbone -> head -> unit rows."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmcl.arrays import as_float_tensor, full_precision
from mmcl.inputs import Inputs, numbers
from mmcl.tables import lookup

FEATURES = "mmcl.features"


class Encoder(nn.Module):
    """One modality's way from raw values to unit rows of width `dim`.

    Args:
        backbone: takes prepared inputs, returns (n, width) features.
        width: of the backbone's features.
        dim: of the embeddings; None for the backbone's own width.
        prepare: raw values of n rows -> inputs on the CPU. None takes arrays and lists of numbers as they are.
        head: "none", "linear" (without bias), or "auto": none where `dim` is the backbone's own width, else linear.
        frozen: the backbone keeps its weights and stays in evaluation mode; only the head learns.
        config: the table name and options that rebuild this encoder, JSON-serialisable; None for a user's module.
        save_assets: writes what `config` cannot say (tokenizer, architecture) into a folder.
    """

    def __init__(
        self,
        backbone: nn.Module,
        width: int,
        dim: int | None = None,
        prepare: Callable[[Any], Inputs] | None = None,
        head: str = "auto",
        frozen: bool = False,
        config: dict[str, Any] | None = None,
        save_assets: Callable[[Path], None] | None = None,
    ):
        super().__init__()
        self.backbone = backbone
        self.dim = width if dim is None else dim
        self.head = lookup(HEADS, head, "head")(width, self.dim)
        self.frozen = frozen
        self.config = config
        self._prepare = prepare or numbers
        self.save_assets = save_assets
        if frozen:
            self.backbone.requires_grad_(False).eval()

    def prepare(self, values: Any) -> Inputs:
        """Inputs of the backbone from n raw values; RowError names the row that cannot be used."""
        return self._prepare(values)

    def forward(self, inputs: Inputs) -> Float[Tensor, "n dim"]:
        """(n, dim) unit rows, at least float32, for the inputs that `prepare` gives."""
        features = self.features(inputs)
        rows = self.head(features)
        with full_precision(rows.device):
            return F.normalize(as_float_tensor(rows), dim=1)

    def features(self, inputs: Inputs) -> Any:
        """(n, width) of the backbone; those of a frozen one may come ready, as {FEATURES: (n, width)}."""
        if isinstance(inputs, Mapping) and FEATURES in inputs:
            return inputs[FEATURES]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            return self.backbone(inputs)

    def train(self, mode: bool = True) -> "Encoder":
        super().train(mode)
        if self.frozen:
            self.backbone.eval()
        return self


def no_head(width: int, dim: int) -> nn.Module:
    """The backbone's features are the embedding."""
    if width != dim:
        raise ValueError(f"head 'none' keeps the backbone's {width} features, yet dim = {dim} was asked for")
    return nn.Identity()


def linear_head(width: int, dim: int) -> nn.Module:
    """A projection without bias, as CLIP's towers end in."""
    layer = nn.Linear(width, dim, bias=False)
    nn.init.normal_(layer.weight, std=1 / math.sqrt(width))
    return layer


def auto_head(width: int, dim: int) -> nn.Module:
    """None where the widths agree, else linear."""
    return no_head(width, dim) if width == dim else linear_head(width, dim)


HEADS = {"auto": auto_head, "linear": linear_head, "none": no_head}
