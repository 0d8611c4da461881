"""A score added to another, fitted by the joint objective on all folds at once.

An addition starts as nothing (its gate is 0), and ends where the rows that decide on stopping liked it best: that may
be nothing still. The objective is -E f + log E' exp(f), E' over the product of the marginals (`mmcl.metrics.objectives`
says how both are taken over rows).
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from mmcl.scores import Score

HIDDEN = 64
"""Width of the hidden layers of networks."""
ROWS_LR, NETWORK_LR, SCORE_LR, DECAY = 0.03, 0.003, 0.01, 0.1
"""Learning rates of table rows, of networks and of scores with their gates, and the weight decay of networks."""
NEWEST = 0.1
"""Weight of the newest parameters in the running mean of them that is looked at and kept."""
CHECK, PATIENCE = 20, 5
"""Steps from one look at the rows that decide on stopping to the next, and looks without gain after which it ends."""

Inputs = Mapping[str, Shaped[Tensor, "..."]]
"""{modality: (n,) int64 categories or (n, k) float32 vectors}; with an axis of folds before, on all folds at once."""
Orders = Mapping[str, Int[Tensor, " c"]]
"""{modality: positions}: column j of a matrix of products has row `orders[name][j]` of each modality."""


class Addition(nn.Module):
    """A score with encoders of its own, times a gate that starts at 0, on top of another that stays as it is.

    Args:
        inputs: whose widths and numbers of categories the encoders take.
        score: to be fitted.
        below: whose rows come encoded, so that it loses its own encoders; None: nothing is below.
    """

    def __init__(self, inputs: Inputs, score: Score, below: "Addition | None" = None):
        super().__init__()
        self.towers = nn.ModuleList(tower(inputs[name], score.dim) for name in score.modalities)
        self.score, self.below = score, below
        self.gate = nn.Parameter(torch.zeros(()))
        if below is not None:
            below.requires_grad_(False).towers = nn.ModuleList()

    def encode(self, inputs: Inputs) -> dict[str, Float[Tensor, "_ d"]]:
        """Unit rows."""
        pairs = zip(self.score.modalities, self.towers, strict=True)
        return {name: F.normalize(each(inputs[name]), dim=-1) for name, each in pairs}

    def forward(
        self, inputs: Inputs, encoded: Mapping[str, Tensor], orders: Mapping[str, Orders], aligned: bool = True
    ) -> tuple[Float[Tensor, " rows"], dict[str, Float[Tensor, "_ _"]]]:
        """The sum's value at rows, and at each row's one modality with tuples of the others.

        Args:
            inputs: rows.
            encoded: the same, by the encoders below.
            orders: {one: which rows of the others make the tuples that it meets}.
            aligned: whether the modalities' rows belong together; where not, none is valued as such.
        """
        rows, products = self.values(self.encode(inputs), orders, aligned)
        if self.below is None:
            return rows, products
        more, more_products = self.below.values(encoded, orders, aligned)
        return rows + more, {one: products[one] + more_products[one] for one in orders}

    def values(
        self, unit: Mapping[str, Tensor], orders: Mapping[str, Orders], aligned: bool
    ) -> tuple[Float[Tensor, " rows"], dict[str, Float[Tensor, "_ _"]]]:
        """`forward` of this score alone, of rows that are encoded."""
        products = {}
        for one, order in orders.items():
            items = self.score.item_vectors({name: unit[name][places] for name, places in order.items()})
            products[one] = self.gate * self.score.query_vectors({one: unit[one]}) @ items.T
        return self.gate * self.score(unit) if aligned else self.gate.new_zeros(0), products


def tower(value: Tensor, dim: int) -> nn.Module:
    """A free row a category, or two hidden layers over vectors."""
    if value.ndim == 1:
        return nn.Embedding(int(value.max()) + 1, dim)
    first, second = nn.Linear(value.shape[1], HIDDEN), nn.Linear(HIDDEN, HIDDEN)
    return nn.Sequential(first, nn.GELU(), second, nn.GELU(), nn.Linear(HIDDEN, dim))


@dataclass
class Fit:
    """An addition on every fold: one module, and the parameters of all folds stacked."""

    module: Addition
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @property
    def folds(self) -> int:
        return len(self.parameters["gate"])

    def on_fold(self, fold: int) -> Addition:
        """That fold's module."""
        module = copy.deepcopy(self.module)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self.parameters[name][fold])
        return module

    @torch.no_grad()
    def encode(self, inputs: Inputs) -> dict[str, Float[Tensor, "k _ d"]]:
        """Unit rows of the same rows under each fold's encoders."""
        folds = [self.on_fold(fold).encode(inputs) for fold in range(self.folds)]
        return {name: torch.stack([fold[name] for fold in folds]) for name in inputs}

    def __call__(
        self, inputs: Inputs, encoded: Mapping[str, Tensor], orders: Mapping[str, Orders], aligned: bool = True
    ) -> Any:
        """`Addition.forward` on all folds."""

        def call(parameters: Any, buffers: Any, inputs: Any, encoded: Any) -> Any:
            return functional_call(self.module, (parameters, buffers), (inputs, encoded, orders, aligned))

        return vmap(call)(self.parameters, self.buffers, dict(inputs), dict(encoded))


class Objective(ABC):
    """How -E f + log E' exp(f) is taken over rows, for what is added to one and the same base."""

    inputs: Inputs

    @abstractmethod
    def loss(self, fit: Fit, step: int) -> Float[Tensor, " k"]:
        """Of each fold, on rows that are fitted to; up to a constant."""

    @abstractmethod
    def bound(self, fit: Fit) -> Float[Tensor, " k"]:
        """E f - log E' exp(f) of each fold, on rows that decide on stopping: nats, 0 for nothing."""


@dataclass
class Best:
    """Each fold's parameters where its rows for stopping liked them best."""

    parameters: dict[str, Tensor]
    values: Float[Tensor, " k"]
    idle: int = 0

    @classmethod
    def of(cls, fit: Fit, values: Tensor) -> "Best":
        return cls({name: value.detach().clone() for name, value in fit.parameters.items()}, values)

    def look(self, fit: Fit, values: Float[Tensor, " k"]) -> bool:
        """Keep what is better; whether no fold has found anything better for long."""
        better = values > self.values
        self.idle = 0 if better.any() else self.idle + 1
        self.values = torch.where(better, values, self.values)
        for name, value in fit.parameters.items():
            chosen = better.reshape(-1, *[1] * (value.ndim - 1))
            self.parameters[name] = torch.where(chosen, value.detach(), self.parameters[name])
        return self.idle >= PATIENCE


def add(
    score: Callable[[], Score],
    base: Fit | None,
    objective: Objective,
    folds: int,
    steps: int,
    report: Callable[[], None] = lambda: None,
) -> Fit:
    """Fit a new score on top of `base`, on all folds at once.

    Args:
        score: () -> a new score; its start, and that of its encoders, is drawn from torch's global generator.
        steps: at most.
        report: called after each step.
    """
    modules = [Addition(objective.inputs, score(), base.on_fold(fold) if base else None) for fold in range(folds)]
    fit = Fit(modules[0], *stack_module_state(modules))
    mean = Fit(fit.module, {name: value.detach().clone() for name, value in fit.parameters.items()}, fit.buffers)
    optimizer = torch.optim.AdamW(parameter_groups(fit, objective.inputs), fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    free = [name for name, value in fit.parameters.items() if value.requires_grad]
    kept, learned = [mean.parameters[name] for name in free], [fit.parameters[name].detach() for name in free]
    best = Best.of(mean, objective.bound(mean))
    for step in range(steps):
        optimizer.zero_grad()
        objective.loss(fit, step).sum().backward()
        optimizer.step()
        schedule.step()
        torch._foreach_lerp_(kept, learned, NEWEST)
        report()
        if (step % CHECK == CHECK - 1 or step == steps - 1) and best.look(mean, objective.bound(mean)):
            break
    mean.parameters = best.parameters
    return mean


def parameter_groups(fit: Fit, inputs: Inputs) -> list[dict[str, Any]]:
    """Table rows, networks, and the score with its gate, each with its learning rate."""
    rows: dict[str, Any] = {"params": [], "lr": ROWS_LR, "weight_decay": 0.0}
    networks: dict[str, Any] = {"params": [], "lr": NETWORK_LR, "weight_decay": DECAY}
    score: dict[str, Any] = {"params": [], "lr": SCORE_LR, "weight_decay": 0.0}
    of_tower = [rows if inputs[name].ndim == 1 else networks for name in fit.module.score.modalities]
    for name, value in fit.parameters.items():
        if value.requires_grad:
            group = of_tower[int(name.split(".")[1])] if name.startswith("towers.") else score
            group["params"].append(value)
    return [group for group in (rows, networks, score) if group["params"]]
