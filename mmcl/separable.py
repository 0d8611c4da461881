"""What every score is: a number for a tuple (x_1, ..., x_m), split exactly into a query vector and an item vector.

The model's density is `dmu_a / d(mu_1 x ... x mu_m) = exp(score) / Z`. For every score and every split of the
modalities into a query part Q and an item part T

    score(x) = <query_vectors(x_Q), item_vectors(x_T)>

exactly: the separability law. Training, the index and zero-shot classification use these two functions alone.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmcl.arrays import (
    Embeddings,
    Present,
    as_mask,
    as_rows,
    check_modalities,
    full_precision,
    refuse_unknown,
    same_length,
    same_precision,
)
from mmcl.files import save_tensors

MAX_LOGIT_SCALE = math.log(100.0)


class Score(nn.Module, ABC):
    """A number for each tuple, and the two vectors whose inner product it is. The same for any m >= 2."""

    def __init__(self, modalities: Any, dim: Any):
        super().__init__()
        self.modalities = check_modalities(modalities)
        if isinstance(dim, bool) or not isinstance(dim, Integral) or dim < 1:
            raise ValueError(f"dim must be a positive integer, got {dim!r}")
        self.dim = int(dim)

    @abstractmethod
    def forward(self, embeddings: Embeddings, present: Present | None = None) -> Float[Tensor, " n"]:
        """The score of each row.

        Args:
            embeddings: {modality: (n, d)} for every modality.
            present: {modality: (n,) bool}, False where a row lacks the modality.
        Returns: (n,) log density ratios, up to the constant log Z.
        Raises: KeyError for an unknown or missing modality, ValueError for wrong shapes.
        """

    @abstractmethod
    def query_vectors(
        self, embeddings: Embeddings, present: Present | None = None, absent: Iterable[str] = ()
    ) -> Float[Tensor, "n width"]:
        """The query side of the score, (n, width), for any proper subset of the modalities.

        Args:
            embeddings: {modality: (n, d)} of the query modalities.
            present: {modality: (n,) bool}, False where a row lacks the modality.
            absent: modalities that stand on neither side; their part goes into the query.
        Raises: KeyError for an unknown modality, or an absent one that this score cannot replace.
        """

    @abstractmethod
    def item_vectors(self, embeddings: Embeddings, present: Present | None = None) -> Float[Tensor, "n width"]:
        """The item side of the score, (n, width), for any proper subset of the modalities; see `query_vectors`."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Length of query and item vectors."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """What `score_from_config` rebuilds this score from, JSON-serialisable."""

    @torch.no_grad()
    def clamp_scales_(self) -> None:
        """Project every learned scale back to at most 100 (CLIP's cap); `fit` calls it after each step."""
        for name, parameter in self.named_parameters():
            if name.rpartition(".")[2] == "logit_scale":
                parameter.clamp_(max=MAX_LOGIT_SCALE)

    def __add__(self, other: "Score") -> "Score":
        from mmcl.scores import SumOfScores

        return SumOfScores(self, other) if isinstance(other, Score) else NotImplemented

    def __radd__(self, other: Any) -> "Score":
        return self if other == 0 else NotImplemented  # so that sum([a, b]) works

    def save(self, path: str | Path) -> None:
        """Write weights and config into one safetensors file."""
        save_tensors(self.state_dict(), path, metadata={"config": json.dumps(self.config())})

    def _apply(self, fn, recurse=True):
        """Scale and weight stay float32 when the model around them is cast to half precision."""

        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in (torch.float16, torch.bfloat16) else moved

        return super()._apply(keep_precision, recurse)


class RowScore(Score):
    """A score computed from each modality's rows: checked input, and full precision whatever autocast says.

    A subclass gives three functions of the list of rows (`_total`, `_query`, `_item`) and the vector that stands for
    an absent modality (`_absent_vector`): absence is a replacement of rows, so the separability law holds with it.
    """

    def forward(self, embeddings: Embeddings, present: Present | None = None) -> Float[Tensor, " n"]:
        rows = self._rows(embeddings, present)
        with full_precision(rows[0].device):
            return self._total(rows)

    def query_vectors(
        self, embeddings: Embeddings, present: Present | None = None, absent: Iterable[str] = ()
    ) -> Float[Tensor, "n width"]:
        absent = (absent,) if isinstance(absent, str) else tuple(dict.fromkeys(absent))
        refuse_unknown(absent, self.modalities, "absent")
        both = [name for name in absent if name in embeddings]
        if both:
            raise ValueError(f"{both[0]!r} is declared absent, yet its embeddings were given")
        rows = self._rows(embeddings, present, self._side(embeddings, absent, "the item"))
        rows += [self._absent_vector(name).to(rows[0].dtype).expand_as(rows[0]) for name in absent]
        with full_precision(rows[0].device):
            return self._query(rows)

    def item_vectors(self, embeddings: Embeddings, present: Present | None = None) -> Float[Tensor, "n width"]:
        rows = self._rows(embeddings, present, self._side(embeddings, (), "the query"))
        with full_precision(rows[0].device):
            return self._item(rows)

    @abstractmethod
    def _total(self, rows: list[Tensor]) -> Tensor: ...

    @abstractmethod
    def _query(self, rows: list[Tensor]) -> Tensor: ...

    @abstractmethod
    def _item(self, rows: list[Tensor]) -> Tensor: ...

    @abstractmethod
    def _absent_vector(self, name: str) -> Tensor: ...

    def _replaces_missing(self, name: str) -> bool:
        """Whether `forward` may be called without this modality at all."""
        return False

    def _side(self, embeddings: Embeddings, absent: tuple[str, ...], other_side: str) -> tuple[str, ...]:
        refuse_unknown(embeddings, self.modalities)
        if not embeddings:
            raise ValueError(f"no embeddings given; name at least one of {list(self.modalities)}")
        if len(set(embeddings) | set(absent)) == len(self.modalities):
            named = sorted({*embeddings, *absent})
            raise ValueError(f"{named} are all the modalities; leave one for {other_side} side")
        return tuple(name for name in self.modalities if name in embeddings)

    def _rows(self, embeddings: Embeddings, present: Present | None, wanted: tuple[str, ...] = ()) -> list[Tensor]:
        """Checked (n, d) rows of the wanted modalities (default: all), absent ones replaced."""
        wanted = wanted or self.modalities
        refuse_unknown(embeddings, self.modalities)
        refuse_unknown(present or {}, self.modalities, "present")
        device = next(self.parameters()).device
        given = {name: as_rows(embeddings[name], name, self.dim, device) for name in wanted if name in embeddings}
        if not given:
            raise KeyError(f"no embeddings given; this score takes {list(self.modalities)}")
        given = same_precision(given, next(self.parameters()))
        count = same_length(given)
        masks = {name: as_mask(mask, name, count, device) for name, mask in (present or {}).items()}
        return [self._fill(name, given, masks, next(iter(given.values()))) for name in wanted]

    def _fill(self, name: str, given: dict[str, Tensor], masks: dict[str, Tensor], like: Tensor) -> Tensor:
        if name not in given:
            if not self._replaces_missing(name) and not (name in masks and not masks[name].any()):
                missing = [each for each in self.modalities if each not in given]
                raise KeyError(f"missing modality {missing}; this score takes {list(self.modalities)}")
            return self._absent_vector(name).to(like.dtype).expand_as(like)
        if name not in masks or masks[name].all():
            return given[name]
        filler = self._absent_vector(name).to(given[name].dtype)
        return torch.where(masks[name].unsqueeze(1), given[name], filler)
