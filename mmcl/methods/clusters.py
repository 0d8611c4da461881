"""Clusters as targets: DeepCluster between epochs, SwAV within each batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmcl.arrays import as_float_tensor
from mmcl.losses.clusters import swapped_predictions
from mmcl.methods.base import (
    Method,
    checked_rows,
    head,
    many_ranks,
    over_ranks,
    refuse_few_views,
    unit,
)


class DeepCluster(Method):
    """A classifier of the clusters that the encoder's own features fell into at the start of the epoch.

    Cluster numbers mean something else after each clustering, so the classifier is drawn anew with them. Clusters weigh
    the same whatever their size, or the largest would swallow the rest.

    Args:
        encoder, width: see `Method`.
        size: rows of the dataset.
        clusters: k of k-means; more than the classes that one hopes for.
        every: epochs from one clustering to the next.
        reduced: dimensions left by PCA with whitening before the clustering; None for no PCA.
        seed: of the clustering and the classifier's starts.
    Source: Caron et al. 2018.
    """

    assigned: Tensor
    epochs: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        width: int,
        size: int,
        clusters: int = 100,
        every: int = 1,
        reduced: int | None = 32,
        seed: int = 0,
    ):
        super().__init__(encoder, width)
        if not 2 <= clusters <= size:
            raise ValueError(f"clusters must be from 2 to the {size} rows, got {clusters}")
        self.classifier = nn.Linear(width, clusters)
        self.every, self.reduced, self.seed = every, reduced, seed
        self.register_buffer("assigned", torch.full((size,), -1, dtype=torch.long))
        self.register_buffer("epochs", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def start_epoch(self, features: Callable[[], Float[Tensor, "rows width"]]) -> None:
        self.epochs += 1
        if not self._clustered_now():
            return
        rows = features()
        if len(rows) != len(self.assigned):
            raise ValueError(f"DeepCluster was made for {len(self.assigned)} rows, got features of {len(rows)}")
        seed = self.seed + int(self.epochs)
        labels = clustered(rows, self.classifier.out_features, self.reduced, seed)
        self.assigned.copy_(labels)
        generator = torch.Generator().manual_seed(seed)
        self.classifier.weight.copy_(0.01 * torch.randn(self.classifier.weight.shape, generator=generator))
        self.classifier.bias.zero_()

    def fresh_parameters(self) -> list[nn.Parameter]:
        return list(self.classifier.parameters()) if self._clustered_now() else []

    def _clustered_now(self) -> bool:
        """Whether the epoch that began last began with a clustering."""
        return (int(self.epochs) - 1) % self.every == 0

    def forward(self, views: Any, rows: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        refuse_few_views(views, 1)
        at = checked_rows(rows, len(views[0]), len(self.assigned), "DeepCluster")
        targets = self.assigned[at]
        if (targets < 0).any():
            raise ValueError("DeepCluster has no cluster labels yet: call start_epoch first")
        clusters = self.classifier.out_features
        sizes = torch.bincount(self.assigned, minlength=clusters).clamp(min=1)
        guesses = [as_float_tensor(self.classifier(self.encoder(view))) for view in views]
        weights = (len(self.assigned) / clusters / sizes[targets].double()).to(guesses[0].dtype)
        losses = [weights * F.cross_entropy(guess, targets, reduction="none") for guess in guesses]
        return over_ranks(torch.stack(losses).mean(), len(views[0]))


def clustered(rows: Float[Tensor, "n d"], clusters: int, reduced: int | None, seed: int) -> Tensor:
    """(n,) cluster numbers by k-means, after PCA with whitening and rows of norm 1; no cluster is empty.

    A cluster that loses its rows takes over the row that lies furthest from its centre (scikit-learn's rule).
    """
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA

    values = rows.detach().cpu().double().numpy()
    if reduced is not None and reduced < min(values.shape):
        values = PCA(reduced, whiten=True, random_state=seed).fit_transform(values)
        values /= np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)
    found = KMeans(clusters, n_init=1, max_iter=50, random_state=seed).fit_predict(values)
    return torch.from_numpy(found).long()


class SwAV(Method):
    """Each view's balanced assignment to prototypes, predicted from the other views.

    Args:
        encoder, width: see `Method`.
        dim: of z.
        prototypes: of norm 1, learned.
        coded: the first views, those of large crops, have codes; the others (multi-crop) only predict.
        temperature: of predictions.
        epsilon, iterations: of the codes; see `mmcl.losses.sinkhorn`.
        hidden, layers, norm: of the head.
    Source: Caron et al. 2020.
    """

    def __init__(
        self,
        encoder: nn.Module,
        width: int,
        dim: int = 128,
        prototypes: int = 100,
        coded: int = 2,
        temperature: float = 0.1,
        epsilon: float = 0.05,
        iterations: int = 3,
        hidden: int | None = None,
        layers: int = 2,
        norm: str = "batch",
    ):
        super().__init__(encoder, width)
        self.head, self.coded = head(width, dim, hidden, layers, norm), coded
        self.prototypes = nn.Linear(dim, prototypes, bias=False)
        self.temperature, self.epsilon, self.iterations = temperature, epsilon, iterations
        self.after_step()

    def forward(self, views: Any, rows: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        refuse_few_views(views, max(2, self.coded))
        scores = [self.prototypes(unit(self.head(self.encoder(view)))) for view in views]
        options = (self.temperature, self.epsilon, self.iterations)
        return swapped_predictions(scores, self.coded, *options, gather=many_ranks())

    @torch.no_grad()
    def after_step(self) -> None:
        self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))
