"""More negatives than a batch holds: a bank of every row, or a queue of recent keys."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmcl.losses.pairs import info_nce, moco
from mmcl.methods.base import (
    Method,
    checked_momentum,
    checked_rows,
    follow,
    frozen_copy,
    head,
    of_all_ranks,
    over_ranks,
    refuse_few_views,
    together,
    unit,
)


class MemoryBank(Method):
    """Each row's running mean of its own embeddings, among those of other rows drawn from the bank.

    Args:
        encoder, width: see `Method`.
        size: rows of the dataset.
        dim: of z.
        negatives: drawn from the bank a step; never rows of the batch.
        temperature: of the loss.
        momentum: of a row's entry.
        hidden, layers, norm: of the head.
        seed: of the bank's start and the draws.
    Source: Wu et al. 2018, with the softmax over the drawn rows in place of noise-contrastive estimation.
    """

    bank: Float[Tensor, "size dim"]
    steps: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        width: int,
        size: int,
        dim: int = 128,
        negatives: int = 1024,
        temperature: float = 0.1,
        momentum: float = 0.5,
        hidden: int | None = None,
        layers: int = 2,
        norm: str = "batch",
        seed: int = 0,
    ):
        super().__init__(encoder, width)
        self.head, self.temperature = head(width, dim, hidden, layers, norm), temperature
        self.negatives, self.momentum = negatives, checked_momentum(momentum)
        self.seed = seed
        self.register_buffer("bank", unit(torch.randn(size, dim, generator=torch.Generator().manual_seed(seed))))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self._pending: tuple[Tensor, Tensor] | None = None

    def forward(self, views: Any, rows: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        refuse_few_views(views, 1)
        at = checked_rows(rows, len(views[0]), len(self.bank), "MemoryBank")
        z = [unit(each) for each in together(nn.Sequential(self.encoder, self.head), views)]
        others = torch.ones(len(self.bank), dtype=torch.bool, device=at.device)
        others[of_all_ranks({"rows": at})[0]["rows"]] = False
        left = others.nonzero()[:, 0]
        if not len(left):
            raise ValueError(f"a batch of all {len(self.bank)} rows leaves the memory bank no negative")
        drawn = left[
            torch.randperm(len(left), generator=generator_of(self.seed, self.steps))[: self.negatives].to(left.device)
        ]
        memory = self.bank.to(z[0].dtype)
        negatives, own = memory[drawn].clone(), memory[at].clone()
        losses = [info_nce(each, own, negatives, 1 / self.temperature) for each in z]
        self.steps += 1
        self._pending = (at, torch.stack([each.detach() for each in z]).mean(0))
        return over_ranks(torch.stack(losses).mean(), len(views[0]))

    @torch.no_grad()
    def after_step(self) -> None:
        if self._pending is None:
            return
        rows, z = self._pending
        self._pending = None
        everyone, _ = of_all_ranks({"rows": rows, "z": z})
        rows, z = everyone["rows"], everyone["z"]
        mixed = self.momentum * self.bank[rows] + (1 - self.momentum) * z.to(self.bank)
        self.bank[rows] = unit(mixed).to(self.bank)


class MoCo(Method):
    """Each query's key, of a slowly following encoder, among a queue of older keys.

    The queue is the one of before the step: keys go in after it. Keys go through their encoder in a shuffled order and
    `key_batches` parts, so that batch statistics do not tell which query is theirs.

    Args:
        encoder, width: see `Method`; the key encoder starts as a copy of it.
        dim: of z.
        queue: keys kept.
        temperature: of the loss.
        momentum: of the key encoder.
        symmetric: ask both views; as MoCo v3.
        key_batches: parts that see batch statistics of their own.
        hidden, layers, norm: of the head; layers=1 is MoCo, 2 is v2.
        seed: of the queue's start and the shuffles.
    Source: He et al. 2020.
    """

    queue: Float[Tensor, "queue dim"]
    place: Tensor
    steps: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        width: int,
        dim: int = 128,
        queue: int = 4096,
        temperature: float = 0.07,
        momentum: float = 0.999,
        symmetric: bool = False,
        key_batches: int = 1,
        hidden: int | None = None,
        layers: int = 2,
        norm: str = "batch",
        seed: int = 0,
    ):
        super().__init__(encoder, width)
        if queue < 1 or key_batches < 1:
            raise ValueError(f"queue and key_batches must be at least 1, got {queue} and {key_batches}")
        self.head = head(width, dim, hidden, layers, norm)
        self.key_encoder, self.key_head = frozen_copy(encoder), frozen_copy(self.head)
        self.temperature, self.momentum = temperature, checked_momentum(momentum)
        self.symmetric, self.key_batches = symmetric, key_batches
        self.seed = seed
        self.register_buffer("queue", unit(torch.randn(queue, dim, generator=torch.Generator().manual_seed(seed))))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self._pending: list[Tensor] = []

    def forward(self, views: Any, rows: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        refuse_few_views(views, 2, 2)
        queue = self.queue.clone()
        ways = [(0, 1), (1, 0)] if self.symmetric else [(0, 1)]
        losses, self._pending = [], []
        for asking, answering in ways:
            query = unit(self.head(self.encoder(views[asking])))
            key = self.keys(views[answering])
            self._pending.append(key)
            losses.append(moco(query, key, queue, self.temperature))
        return over_ranks(torch.stack(losses).mean(), len(views[0]))

    @torch.no_grad()
    def keys(self, view: Tensor) -> Float[Tensor, "n dim"]:
        """Keys of a view's rows, made in a shuffled order over all ranks and put back in theirs."""
        gathered, own = of_all_ranks({"view": view})
        everyone = gathered["view"]
        order = torch.randperm(len(everyone), generator=generator_of(self.seed, self.steps)).to(view.device)
        self.steps += 1
        parts = [part for part in order.chunk(self.key_batches) if len(part)]
        made = torch.cat([unit(self.key_head(self.key_encoder(everyone[part]))) for part in parts])
        return made[torch.argsort(order)][own]

    @torch.no_grad()
    def after_step(self) -> None:
        follow(self.key_encoder, self.encoder, self.momentum)
        follow(self.key_head, self.head, self.momentum)
        for keys in self._pending:
            self.enqueue(of_all_ranks({"keys": keys})[0]["keys"])
        self._pending = []

    @torch.no_grad()
    def enqueue(self, keys: Float[Tensor, "n dim"]) -> None:
        """Keys in the place of the oldest; of more keys than places the last ones stay."""
        keys = keys[-len(self.queue) :]
        at = (int(self.place) + torch.arange(len(keys), device=self.queue.device)) % len(self.queue)
        self.queue[at] = keys.detach().to(self.queue)
        self.place.fill_((int(self.place) + len(keys)) % len(self.queue))


def generator_of(seed: int, step: Tensor) -> torch.Generator:
    """Of one step's draws: a function of what a checkpoint holds, so that a resumed run draws the same."""
    return torch.Generator().manual_seed(1_000_003 * seed + int(step))
