"""Scores fitted to a joint that is known: exactly, by its whole table, or by draws from it alone.

Encoders are a free row a value ("table") or a small network of what stands for the value ("mlp"), unit rows either way.
Several runs, which differ in their seeds, are fitted at once as one batch of parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from mmcl.losses import contrastive_loss
from mmcl.metrics.expressivity import score_table
from mmcl.scores import Score
from mmcl.synthetic.grids import Grid
from mmcl.synthetic.joints import Joint
from mmcl.tables import lookup

HIDDEN = 64
Loss = Callable[[Score, Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]
"""(score, {modality: (n, d)}, {modality: (n,) values}) -> the loss of a batch."""


@dataclass(frozen=True)
class Fitted:
    """A score and its encoders, fitted; `scores` is its table."""

    model: "Tilt"
    scores: Float64[Tensor, "..."]


class Tilt(nn.Module):
    """A score with an encoder a modality for the values of a joint.

    Args:
        score: over the joint's modalities.
        joint: whose values are encoded: by their number, or by their points where it is a `Grid`.
        encoder: "table" or "mlp".
    """

    def __init__(self, score: Score, joint: Joint, encoder: str = "table"):
        super().__init__()
        make = lookup(ENCODERS, encoder, "encoder")
        self.score = score
        self.towers = nn.ModuleDict({name: make(inputs_of(joint, name), score.dim) for name in joint.modalities})

    def embeddings(self) -> dict[str, Float[Tensor, "_ d"]]:
        """Unit rows of all values of each modality."""
        return {name: F.normalize(tower(), dim=1) for name, tower in self.towers.items()}

    def forward(self) -> Float64[Tensor, "..."]:
        """The table of scores."""
        return score_table(self.score, self.embeddings())


class TableRows(nn.Module):
    """A free row a value."""

    def __init__(self, inputs: Tensor, dim: int):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(len(inputs), dim, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.rows


class NetworkRows(nn.Module):
    """Two hidden layers over what stands for each value."""

    def __init__(self, inputs: Tensor, dim: int):
        super().__init__()
        self.register_buffer("inputs", inputs)
        first, second = nn.Linear(inputs.shape[1], HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.Sequential(first, nn.GELU(), second, nn.GELU(), nn.Linear(HIDDEN, dim)).double()

    def forward(self) -> Tensor:
        return self.layers(self.inputs)


ENCODERS: dict[str, Callable[[Tensor, int], nn.Module]] = {"table": TableRows, "mlp": NetworkRows}


def inputs_of(joint: Joint, name: str) -> Float64[Tensor, "values k"]:
    """What stands for each value: its point, or a one-hot row."""
    if isinstance(joint, Grid):
        return joint.points[name]
    return torch.eye(joint.table.shape[joint.modalities.index(name)], dtype=torch.float64)


def tilts(
    joint: Joint,
    make_score: Callable[[], Score],
    seeds: Sequence[int],
    encoder: str = "table",
    learn_scale: bool = True,
) -> list[Tilt]:
    """A tilt a seed, in float64; without `learn_scale` the temperature stays where it starts."""
    found = []
    for seed in seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            found.append(Tilt(make_score().double(), joint, encoder))
        for name, parameter in found[-1].named_parameters():
            parameter.requires_grad_(learn_scale or not name.endswith("logit_scale"))
    return found


def fit_exactly(
    joint: Joint,
    make_score: Callable[[], Score],
    seeds: Sequence[int] = (0,),
    encoder: str = "table",
    steps: int = 2000,
    lr: float = 0.03,
    learn_scale: bool = True,
) -> list[Fitted]:
    """Minimise the joint KL itself, by Adam with a cosine schedule, with the table in hand.

    Args:
        make_score: () -> a new score over the joint's modalities.
        seeds: of the encoders' start; one run each, all at once.
        encoder: "table" or "mlp".
    Returns: a fit a seed. Memory O(len(seeds) * tuples).
    """
    models = tilts(joint, make_score, seeds, encoder, learn_scale)
    parameters, buffers = stack_module_state(models)
    free = {name for name, value in models[0].named_parameters() if value.requires_grad}
    optimizer = torch.optim.Adam([parameters[name] for name in free], lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    base = joint.product_of_marginals().log()

    def table(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return functional_call(models[0], (parameters, buffers), ())

    for _ in range(steps):
        scores = vmap(table)(parameters, buffers)
        # the joint KL but for a constant of the joint
        loss = (base + scores).flatten(1).logsumexp(1) - (joint.table * scores).flatten(1).sum(1)
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        schedule.step()
    return [finished(model, parameters, row) for row, model in enumerate(models)]


def finished(model: Tilt, parameters: Mapping[str, Tensor], row: int) -> Fitted:
    """One run taken out of the batch."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name][row])
        return Fitted(model, model())


def each_from_all_others(score: Score, embeddings: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Tensor:
    """The default loss of training; that rows repeat one another's values is no trouble to it."""
    return contrastive_loss(score, embeddings)


def fit_by_draws(
    joint: Joint,
    score: Score,
    loss: Loss = each_from_all_others,
    encoder: str = "table",
    batch_size: int = 512,
    steps: int = 3000,
    lr: float = 0.01,
    seed: int = 0,
) -> Fitted:
    """Train on draws from the joint, without its table, as one trains on data: Adam with a cosine schedule."""
    generator = torch.Generator().manual_seed(seed)
    (model,) = tilts(joint, lambda: score, [seed], encoder)
    model.float()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        values = joint.sample(batch_size, generator)
        rows = {name: embedded[values[name]] for name, embedded in model.embeddings().items()}
        optimizer.zero_grad()
        loss(model.score, rows, values).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return Fitted(model, model.double()())
