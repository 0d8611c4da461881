"""The scores: CLIP and its sum over pairs, the Hadamard product (H-CLIP), and sums of scores.

Each is separable (see `mmcl.separable`): query and item vectors whose inner product is the score, for any split.

| score | query vector | item vector | width |
|---|---|---|---|
| Hadamard | `w * prod_Q g` | `prod_T g` | d |
| sum of pairs | `s [sum_Q g, c_Q, 1]` | `[sum_T g, 1, c_T]`, c_S the sum of <g_i, g_j> inside S | d + 2 |
| sum of scores | concatenation | concatenation | sum |
"""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor, nn

from mmcl.arrays import Embeddings, Present
from mmcl.separable import MAX_LOGIT_SCALE, RowScore, Score
from mmcl.tables import lookup

__all__ = ["SCORES", "Hadamard", "Score", "SumOfPairs", "SumOfScores", "load_score", "score_from_config"]


class SumOfPairs(RowScore):
    """`s * sum_{i<j} <g_i, g_j>`, s = 1 / temperature learned in the log domain. Two modalities: CLIP.

    Fits every pairwise conditional and no interaction of three modalities. Absent modalities drop out of the sum.

    Args:
        modalities: two or more distinct names.
        dim: d, the width of every embedding.
        temperature: 1 / s at the start, at least 0.01 (the scale is capped at 100).
    Source: Radford et al. 2021, section 2.3, for m = 2; the sum over pairs is the usual extension to m > 2.
    """

    def __init__(self, modalities: Any, dim: Any, temperature: float = 0.07):
        super().__init__(modalities, dim)
        self.logit_scale = nn.Parameter(torch.tensor(log_scale(temperature)))

    @property
    def scale(self) -> Float[Tensor, ""]:
        """s, at most 100."""
        return capped_exp(self.logit_scale)

    @property
    def width(self) -> int:
        return self.dim + 2

    def config(self) -> dict[str, Any]:
        return {"name": "sum_of_pairs", "modalities": list(self.modalities), "dim": self.dim}

    def _total(self, rows: list[Tensor]) -> Tensor:
        return self.scale * sum_and_pairs(rows)[1]

    def _query(self, rows: list[Tensor]) -> Tensor:
        total, pairs = sum_and_pairs(rows)
        return self.scale * torch.cat([total, pairs.unsqueeze(1), torch.ones_like(total[:, :1])], dim=1)

    def _item(self, rows: list[Tensor]) -> Tensor:
        total, pairs = sum_and_pairs(rows)
        return torch.cat([total, torch.ones_like(total[:, :1]), pairs.unsqueeze(1)], dim=1)

    def _absent_vector(self, name: str) -> Tensor:
        return torch.zeros(self.dim, device=self.logit_scale.device)


class Hadamard(RowScore):
    """`<w, g_1 * g_2 * ... * g_m>` elementwise, w in R^d learned (H-CLIP). Expresses any joint of any m modalities.

    `w = exp(logit_scale) * d^((m-2)/2) * weight`, weight starting at ones: the m-fold product of unit vectors shrinks
    like d^(-m/2) a coordinate, and the factor restores CLIP's logit scale for every m.

    Args:
        modalities: two or more distinct names.
        dim: d, the width of every embedding.
        temperature: exp(-logit_scale) at the start, at least 0.01 (the scale is capped at 100).
        tied: weight stays at ones, so w is one learned scalar times ones (Symile's score; CLIP at m = 2).
        neutral: learn a vector a modality that stands in for it where it is absent, started at ones / sqrt(d).
    """

    weight: Tensor

    def __init__(
        self,
        modalities: Any,
        dim: Any,
        temperature: float = 0.07,
        tied: bool = False,
        neutral: bool = False,
    ):
        super().__init__(modalities, dim)
        self.tied = tied
        self.logit_scale = nn.Parameter(torch.tensor(log_scale(temperature)))
        ones = torch.ones(self.dim)
        if tied:
            self.register_buffer("weight", ones)
        else:
            self.weight = nn.Parameter(ones)
        start = torch.full((len(self.modalities), self.dim), self.dim**-0.5)
        self.neutral = nn.Parameter(start) if neutral else None

    @property
    def w(self) -> Float[Tensor, " d"]:
        """The learned weights of the product's coordinates."""
        return capped_exp(self.logit_scale) * self.dim ** ((len(self.modalities) - 2) / 2) * self.weight

    @property
    def width(self) -> int:
        return self.dim

    def config(self) -> dict[str, Any]:
        options = {"tied": self.tied, "neutral": self.neutral is not None}
        return {"name": "hadamard", "modalities": list(self.modalities), "dim": self.dim, **options}

    def _total(self, rows: list[Tensor]) -> Tensor:
        return product(rows) @ self.w.to(rows[0].dtype)

    def _query(self, rows: list[Tensor]) -> Tensor:
        return self.w * product(rows)

    def _item(self, rows: list[Tensor]) -> Tensor:
        return product(rows)

    def _absent_vector(self, name: str) -> Tensor:
        if self.neutral is None:
            raise KeyError(
                f"{name!r} is absent, and this Hadamard score has no neutral vector for it; give its embeddings, or "
                f"build the score with neutral=True (modalities {list(self.modalities)})"
            )
        return self.neutral[self.modalities.index(name)]

    def _replaces_missing(self, name: str) -> bool:
        return self.neutral is not None


class SumOfScores(Score):
    """`a + b`: the scores add up, their query and item vectors are concatenated."""

    def __init__(self, *parts: Score):
        flat = [each for part in parts for each in (part.parts if isinstance(part, SumOfScores) else [part])]
        first = flat[0]
        for part in flat[1:]:
            if set(part.modalities) != set(first.modalities) or part.dim != first.dim:
                raise ValueError(
                    "scores add up over the same modalities and dim: "
                    f"{first.modalities}, {first.dim} against {part.modalities}, {part.dim}"
                )
        super().__init__(first.modalities, first.dim)
        self.terms = nn.ModuleList(flat)

    @property
    def parts(self) -> list[Score]:
        """The scores that are summed, in the order of their coordinates."""
        return [cast(Score, term) for term in self.terms]

    @property
    def width(self) -> int:
        return sum(part.width for part in self.parts)

    def config(self) -> dict[str, Any]:
        return {"name": "sum_of_scores", "parts": [part.config() for part in self.parts]}

    def forward(self, embeddings: Embeddings, present: Present | None = None) -> Float[Tensor, " n"]:
        return torch.stack([part(embeddings, present) for part in self.parts]).sum(0)

    def query_vectors(
        self, embeddings: Embeddings, present: Present | None = None, absent: Iterable[str] = ()
    ) -> Float[Tensor, "n width"]:
        absent = (absent,) if isinstance(absent, str) else tuple(absent)
        return torch.cat([part.query_vectors(embeddings, present, absent) for part in self.parts], dim=1)

    def item_vectors(self, embeddings: Embeddings, present: Present | None = None) -> Float[Tensor, "n width"]:
        return torch.cat([part.item_vectors(embeddings, present) for part in self.parts], dim=1)


def log_scale(temperature: float) -> float:
    """log(1 / temperature), refused outside what the cap of 100 on the scale allows."""
    if not 0.01 <= temperature < math.inf:
        raise ValueError(f"temperature must be at least 0.01 (the scale is capped at 100), got {temperature}")
    return min(math.log(1.0 / temperature), MAX_LOGIT_SCALE)


def capped_exp(logit_scale: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """exp(logit_scale), at most 100."""
    return logit_scale.clamp(max=MAX_LOGIT_SCALE).exp()


def sum_and_pairs(rows: list[Float[Tensor, "n d"]]) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
    """The sum of all rows and the sum of their pairwise inner products, in one pass."""
    total, pairs = rows[0], torch.zeros_like(rows[0][:, 0])
    for row in rows[1:]:
        pairs = pairs + (total * row).sum(1)
        total = total + row
    return total, pairs


def product(rows: list[Float[Tensor, "n d"]]) -> Float[Tensor, "n d"]:
    """Elementwise product of all modalities."""
    result = rows[0]
    for row in rows[1:]:
        result = result * row
    return result


def sum_of_both(
    modalities: Any, dim: Any, temperature: float = 0.07, tied: bool = False, neutral: bool = False
) -> SumOfScores:
    """`SumOfPairs + Hadamard`, each with its own learned scale; index rows are 2d + 2 wide."""
    pairs = SumOfPairs(modalities, dim, temperature)
    return SumOfScores(pairs, Hadamard(modalities, dim, temperature, tied, neutral))


SCORES: dict[str, Callable[..., Score]] = {
    "sum_of_pairs": SumOfPairs,
    "hadamard": Hadamard,
    "sum_of_both": sum_of_both,
}
"""What recipes and `mmcl list scores` choose from: (modalities, dim, **options) -> Score."""


def score_from_config(config: dict[str, Any]) -> Score:
    """The score that `config` (see `Score.config`) describes; its learned values come from a state dict."""
    options = dict(config)
    name = options.pop("name", None)
    if name == "sum_of_scores":
        return SumOfScores(*(score_from_config(part) for part in options["parts"]))
    return lookup(SCORES, name, "score")(**options)


def load_score(path: str | Path) -> Score:
    """The score that `Score.save` wrote."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if "config" not in metadata:
            raise ValueError(f"{path} was not written by Score.save: it holds no config")
        score = score_from_config(json.loads(metadata["config"]))
        names = file.keys()
        state = {name: file.get_tensor(name) for name in names}
    if any(value.dtype == torch.float64 for value in state.values()):
        score.double()
    score.load_state_dict(state)
    return score
