"""How E f and E' exp(f) are taken over rows: from a whole table of categories, or from batches of any kind."""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmcl.metrics.additions import Fit, Inputs, Objective, Orders

COLUMNS = 128
"""Tuples of the product of marginals that each row of a batch is scored with; four times as many where it is judged."""
NOISE = 0.3
"""Standard deviation of what is added to vectors in a batch."""


class WholeTable(Objective):
    """Categories of few enough tuples: every sum over the product of the marginals is exact, and no batch is drawn.

    Args:
        inputs: {modality: (n,) categories}.
        base: what is added to; None: nothing.
        fitted, stopping: rows of each fold.
    """

    def __init__(self, inputs: Inputs, base: Fit | None, fitted: Int[Tensor, "k a"], stopping: Int[Tensor, "k b"]):
        self.inputs = inputs
        self.sizes = {name: int(value.max()) + 1 for name, value in inputs.items()}
        values = {name: torch.arange(size) for name, size in self.sizes.items()}
        self.first, *rest = values
        places = torch.cartesian_prod(*[values[name] for name in rest]).reshape(-1, len(rest))
        self.orders = {name: places[:, at].contiguous() for at, name in enumerate(rest)}
        self.values = {name: value.expand(len(fitted), -1) for name, value in values.items()}
        self.encoded = base.encode(values) if base else {}
        self.tables = {"fitted": self._tables(fitted), "stopping": self._tables(stopping)}

    def loss(self, fit: Fit, step: int) -> Float[Tensor, " k"]:
        return -self._bound(fit, "fitted")

    @torch.no_grad()
    def bound(self, fit: Fit) -> Float[Tensor, " k"]:
        return self._bound(fit, "stopping")

    def _bound(self, fit: Fit, part: str) -> Float[Tensor, " k"]:
        joint, log_product = self.tables[part]
        _, products = fit(self.values, self.encoded, {self.first: self.orders}, aligned=False)
        scores = products[self.first].flatten(1)
        return (joint * scores).sum(1) - (log_product + scores).logsumexp(1)

    def _tables(self, rows: Int[Tensor, "k r"]) -> tuple[Float[Tensor, "k cells"], Float[Tensor, "k cells"]]:
        """Shares of all tuples, and the logarithm of the product of their marginals."""
        shape = tuple(self.sizes.values())
        joints = torch.zeros(len(rows), *shape)
        for fold, chosen in enumerate(rows):
            places = tuple(value[chosen] for value in self.inputs.values())
            joints[fold].index_put_(places, torch.ones(len(chosen)), accumulate=True)
        joints /= rows.shape[1]
        product = torch.ones(len(rows), *[1] * len(shape))
        for axis in range(1, joints.ndim):
            others = [other for other in range(1, joints.ndim) if other != axis]
            product = product * joints.sum(others, keepdim=True)
        return joints.flatten(1), product.log().flatten(1)


class Batches(Objective):
    """Rows of any kind: in a batch, the value of one modality in each row meets shuffled tuples of the others.

    Args:
        inputs: {modality: (n,) categories or (n, k) vectors}.
        base: what is added to; None: nothing.
        fitted, stopping: rows of each fold.
        size: rows of a batch.
        generator: of batches, noise and shuffles.
    """

    def __init__(
        self,
        inputs: Inputs,
        base: Fit | None,
        fitted: Int[Tensor, "k a"],
        stopping: Int[Tensor, "k b"],
        size: int,
        generator: torch.Generator,
    ):
        self.inputs, self.fitted, self.stopping = inputs, fitted, stopping
        self.size, self.generator = size, generator
        self.encoded = base.encode(inputs) if base else {}
        self.judged = shuffles(inputs, stopping.shape[1], generator, 4 * COLUMNS)

    def loss(self, fit: Fit, step: int) -> Float[Tensor, " k"]:
        picked = torch.randint(self.fitted.shape[1], (len(self.fitted), self.size), generator=self.generator)
        batch, encoded = self._rows(self.fitted.gather(1, picked))
        batch = {name: self._noisy(value) for name, value in batch.items()}
        one = list(self.inputs)[step % len(self.inputs)]
        orders = shuffles(self.inputs, self.size, self.generator, COLUMNS)[one]
        rows, products = fit(batch, encoded, {one: orders})
        return products[one].flatten(1).logsumexp(1) - rows.mean(1)

    @torch.no_grad()
    def bound(self, fit: Fit) -> Float[Tensor, " k"]:
        batch, encoded = self._rows(self.stopping)
        rows, products = fit(batch, encoded, self.judged)
        whole = torch.cat([values.flatten(1) for values in products.values()], dim=1)
        return rows.mean(1) - whole.logsumexp(1) + math.log(whole.shape[1])

    def _rows(self, rows: Int[Tensor, "k r"]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Those rows of each fold, and as what is below encodes them."""
        folds = torch.arange(len(rows))[:, None]
        encoded = {name: value[folds, rows] for name, value in self.encoded.items()}
        return {name: value[rows] for name, value in self.inputs.items()}, encoded

    def _noisy(self, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        return value + NOISE * torch.randn(value.shape, generator=self.generator)


def shuffles(
    inputs: Mapping[str, Tensor], rows: int, generator: torch.Generator, columns: int | None = None
) -> dict[str, Orders]:
    """{one modality: {each other: so many rows in random order, without repeats}}."""
    return {
        one: {name: torch.randperm(rows, generator=generator)[:columns] for name in inputs if name != one}
        for one in inputs
    }
