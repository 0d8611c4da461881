"""Figures on held-out rows while training: the loss, and finding each modality from all the others."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmcl.batching import BatchMaker
from mmcl.data import column_rows
from mmcl.losses import contrastive_loss
from mmcl.metrics.retrieval import retrieval_report
from mmcl.model import MultimodalModel
from mmcl.modes import evaluating

ENCODE_ROWS = 256


def validate(
    model: MultimodalModel,
    dataset: Any,
    columns: Mapping[str, str] | None = None,
    groups: Mapping[str, str] | None = None,
    rows: int = 1000,
    seed: int = 0,
) -> dict[str, float]:
    """Loss (nats, guess "each") and each modality's recall at 1 and MRR from the others, among the first `rows` rows.

    Rows of one group are one answer: finding any of them counts. Memory O(rows^2).
    """
    with evaluating(model):
        embeddings, ids = embed_rows(model, dataset, columns, groups, rows)
        generator = torch.Generator().manual_seed(seed)
        figures = {"loss": float(contrastive_loss(model.score, embeddings, groups=ids, generator=generator))}
        for name in model.modalities:
            rest = {other: value for other, value in embeddings.items() if other != name}
            scores = model.score.query_vectors(rest) @ model.score.item_vectors({name: embeddings[name]}).T
            answer = ids.get(name, torch.arange(len(scores)))
            relevant = (answer.unsqueeze(1) == answer.unsqueeze(0)).cpu()
            report = retrieval_report(scores.cpu(), relevant, ks=(1,))
            figures |= {f"{name}_recall_at_1": report["recall_at_1"], f"{name}_mrr": report["mrr"]}
    return figures


def embed_rows(
    model: MultimodalModel,
    dataset: Any,
    columns: Mapping[str, str] | None,
    groups: Mapping[str, str] | None,
    limit: int,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(embeddings, group ids) of the first `limit` rows."""
    maker = BatchMaker(model, dataset, columns, groups)
    parts: list[dict[str, Tensor]] = []
    ids: list[dict[str, Tensor]] = []
    done = 0
    for numbers, values in column_rows(maker.dataset.take(limit), ENCODE_ROWS):
        batch = maker.batch(numbers, values)
        parts.append(model.encode(batch.inputs))
        ids.append(batch.groups)
        done += len(numbers)
    if done < 2:
        raise ValueError(f"validation needs at least 2 rows, got {done}")
    return join(parts), join(ids)


def join(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate by name."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
