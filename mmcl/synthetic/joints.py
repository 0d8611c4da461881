"""Joint distributions of a few values a modality: every marginal, conditional and best score known exactly.

All entropies and divergences are in nats. Any number of modalities and of values a modality; the whole table is held.

| joint | weight of (i, j, k) | dependence beyond pairs |
|---|---|---|
| `softened_sum` | 4 where i + j + k is 0 modulo n | all of it: every pair is independent |
| `random_tensor` | 2 z_ijk | some |
| `random_pairwise` | 1.5 (a_ij + b_ik + c_jk) | none |
| `coherent_pairs` | the same, and 2.5 where j = k | none; the parts of (j, k) fit each other strongly |
| `parity` | plus or minus strength: the product of the signs | all of it |
| `product_interaction` | strength * x_i x_j x_k, values on [-1, 1] | nearly all of it |
| `planted_mixture` | .75 (a_ij + b_ik + c_jk), and 3.5 where i + j + k is 0 modulo n | some, by one interaction |
| `xor_to_identity` | k is i XOR j with a probability, else i | from all of it to none |
| `independent` | a_i + b_j + c_k | no dependence at all |
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from mmcl.arrays import check_modalities, refuse_unknown


@dataclass(frozen=True)
class Joint:
    """A distribution of tuples (x_1, ..., x_m) of finitely many values.

    Args:
        table: float64 (n_1, ..., n_m), not negative, sums to 1; one axis a modality.
        modalities: the names of the axes.
    Raises: ValueError where the table is no distribution, or has another number of axes than there are names.
    """

    table: Any
    modalities: tuple[str, ...]

    def __post_init__(self) -> None:
        table = torch.as_tensor(self.table, dtype=torch.float64)
        names = check_modalities(self.modalities)
        if table.ndim != len(names):
            raise ValueError(f"{len(names)} modalities {names} need as many axes; the table is {tuple(table.shape)}")
        if not table.numel() or not (table >= 0).all() or abs(float(table.sum()) - 1) > 1e-6:
            raise ValueError(f"a joint table must not be negative and must sum to 1, got a sum of {float(table.sum())}")
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "modalities", names)

    def marginal(self, names: str | Iterable[str]) -> Float64[Tensor, "..."]:
        """p(x_names): its axes are the named modalities in the joint's own order."""
        kept = self._axes(names)
        rest = [axis for axis in range(self.table.ndim) if axis not in kept]
        return self.table.sum(dim=rest) if rest else self.table

    def marginals(self) -> dict[str, Float64[Tensor, " n"]]:
        """p(x_i) of every single modality."""
        return {name: self.marginal(name) for name in self.modalities}

    def conditional(self, names: str | Iterable[str]) -> Float64[Tensor, "..."]:
        """p(x_names | the rest), in the shape of the table; 0 where the condition never happens."""
        axes = self._axes(names)
        condition = self.table.sum(dim=axes, keepdim=True)
        return torch.where(condition > 0, self.table / condition, 0.0)

    def product_of_marginals(self) -> Float64[Tensor, "..."]:
        """prod_i p(x_i), in the shape of the table."""
        product = torch.ones((), dtype=torch.float64)
        for marginal in self.marginals().values():
            product = product.unsqueeze(-1) * marginal
        return product

    def log_ratio(self) -> Float64[Tensor, "..."]:
        """log p(x) / prod_i p(x_i), in the shape of the table: the best score, up to a constant. -inf where p is 0."""
        product = self.product_of_marginals()
        return torch.where(self.table > 0, self.table.log() - product.log(), -math.inf)

    def total_correlation(self) -> float:
        """KL(p || prod_i p_i): all the dependence there is. Source: Watanabe 1960."""
        return float((self.table * torch.where(self.table > 0, self.log_ratio(), 0.0)).sum())

    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """{modality: (count,) int64} values; row r of all modalities is one draw."""
        drawn = torch.multinomial(self.table.flatten(), count, replacement=True, generator=generator)
        values = torch.unravel_index(drawn, self.table.shape)
        return dict(zip(self.modalities, values, strict=True))

    def _axes(self, names: str | Iterable[str]) -> list[int]:
        names = (names,) if isinstance(names, str) else tuple(names)
        refuse_unknown(names, self.modalities, "the names of a marginal or conditional")
        if not names:
            raise ValueError(f"name at least one of the modalities {list(self.modalities)}")
        return [axis for axis, name in enumerate(self.modalities) if name in names]


def from_weights(weights: Tensor) -> Joint:
    """p proportional to exp(weights), for weights of any shape (n_1, ..., n_m); modalities "x1", "x2", ..., "xm".

    Other names: `dataclasses.replace(joint, modalities=("text", "image", "audio"))`.
    """
    table = torch.softmax(weights.double().flatten(), dim=0).reshape(weights.shape)
    return Joint(table, tuple(f"x{axis + 1}" for axis in range(weights.ndim)))


def softened_sum(n: int = 8, strength: float = 4.0, m: int = 3) -> Joint:
    """exp(strength) times as likely where the values add up to 0 modulo n; any m - 1 of them are independent."""
    return from_weights(strength * adds_up(n, m))


def random_tensor(n: int = 8, strength: float = 2.0, m: int = 3, seed: int = 1) -> Joint:
    """Normal log-weights, one a tuple: dependence of every order."""
    generator = torch.Generator().manual_seed(seed)
    return from_weights(strength * torch.randn(n**m, generator=generator).reshape((n,) * m))


def random_pairwise(n: int = 8, strength: float = 1.5, m: int = 3, seed: int = 1) -> Joint:
    """Normal log-weights, one a pair of values: nothing beyond pairs."""
    return from_weights(strength * pair_weights(n, m, seed))


def coherent_pairs(n: int = 8, strength: float = 1.5, coherence: float = 2.5, m: int = 3, seed: int = 1) -> Joint:
    """`random_pairwise`, and exp(coherence) times as likely for each pair of x2, ..., xm that is equal.

    The parts of an item (x2, ..., xm) fit each other, whatever x1 says: the score rewards it for that too, though it
    tells nothing about which item goes with an x1.
    """
    weights = strength * pair_weights(n, m, seed)
    for first, second in combinations(range(1, m), 2):
        weights = weights + coherence * on_axes(torch.eye(n).double(), first, second, m)
    return from_weights(weights)


def parity(strength: float = math.inf, m: int = 3) -> Joint:
    """Signs with p proportional to exp(strength * their product), value 0 for +1 and 1 for -1.

    The default, an infinite strength, is even parity itself: any m - 1 signs are independent, and tell the last.
    """
    signs = torch.tensor([1.0, -1.0])
    product = torch.ones(())
    for _ in range(m):
        product = product.unsqueeze(-1) * signs
    return from_weights(torch.where(product > 0, 0.0, -2.0 * strength))


def product_interaction(n: int = 8, strength: float = 3.0, m: int = 3) -> Joint:
    """Log-weights strength * x_1 x_2 ... x_m for values equally spaced on [-1, 1]: one interaction, of the order m.

    The finite twin of `mmcl.synthetic.grids.product_density`.
    """
    values = torch.linspace(-1, 1, n, dtype=torch.float64)
    weights = torch.full((), strength, dtype=torch.float64)
    for _ in range(m):
        weights = weights.unsqueeze(-1) * values
    return from_weights(weights)


def planted_mixture(n: int = 7, pairwise: float = 0.75, higher: float = 3.5, m: int = 3, seed: int = 0) -> Joint:
    """The log-weights of `random_pairwise`, and exp(higher) times as likely where the values add up to 0 modulo n."""
    return from_weights(pairwise * pair_weights(n, m, seed) + higher * adds_up(n, m))


def xor_to_identity(probability: float = 0.5, bits: int = 1, m: int = 3) -> Joint:
    """The last modality is the XOR of all others with this probability, else the first one's value; n = 2^bits.

    At 1 nothing but all m together tells anything, at 0 the first and the last modality say it all.

    Raises: ValueError for a probability outside 0..1.
    Source: Saporta et al. 2024 (Symile), section 5.1, for m = 3.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must be from 0 to 1, got {probability}")
    n = 2**bits
    *others, last = torch.meshgrid(*[torch.arange(n)] * m, indexing="ij")
    together = functools.reduce(torch.bitwise_xor, others)
    table = probability * (last == together) + (1 - probability) * (last == others[0]).double()
    return Joint(table / n ** (m - 1), tuple(f"x{axis + 1}" for axis in range(m)))


def independent(n: int = 8, strength: float = 1.0, m: int = 3, seed: int = 1) -> Joint:
    """Normal log-weights, one a value: no dependence, total correlation 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(())
    for _ in range(m):
        weights = weights.unsqueeze(-1) + torch.randn(n, generator=generator).double()
    return from_weights(strength * weights)


JOINTS: dict[str, Callable[..., Joint]] = {
    each.__name__: each
    for each in (
        softened_sum,
        random_tensor,
        random_pairwise,
        coherent_pairs,
        parity,
        product_interaction,
        planted_mixture,
        xor_to_identity,
        independent,
    )
}
"""By name; every one takes `m`, and has defaults."""


def adds_up(n: int, m: int) -> Tensor:
    """(n, ..., n) bool: where m values add up to 0 modulo n."""
    return torch.stack(torch.meshgrid(*[torch.arange(n)] * m, indexing="ij")).sum(0) % n == 0


def pair_weights(n: int, m: int, seed: int) -> Tensor:
    """(n, ..., n) sum over pairs of modalities of one normal (n, n) matrix each, pairs in lexicographic order.

    The matrices are drawn after the n^m numbers that `random_tensor` takes from the same seed.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.randn(n**m, generator=generator)
    pairs = combinations(range(m), 2)
    return torch.stack([on_axes(torch.randn(n, n, generator=generator).double(), *pair, m) for pair in pairs]).sum(0)


def on_axes(matrix: Tensor, first: int, second: int, m: int) -> Tensor:
    """An (n, n) matrix on two of m axes, repeated along the others."""
    n = len(matrix)
    shape = [n if axis in (first, second) else 1 for axis in range(m)]
    return matrix.reshape(shape).expand((n,) * m)
