"""The settings of `mmcl.fit` and `mmcl.methods.pretrain`, in a module that costs nothing to import."""

from typing import Any, Literal

from pydantic import Field

from mmcl.settings import Settings


class FitSettings(Settings):
    """How `fit` trains; in recipes the table [train]."""

    loss: str = "contrastive"
    """contrastive, joint or pairwise; see `mmcl list losses`."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Of that loss, such as guess, candidates, block_size, negatives."""
    epochs: int = Field(5, ge=1)
    """Passes over the data. Rows that do not fill a batch are left out of their epoch, others in each."""
    steps: int | None = Field(None, ge=1)
    """Optimiser steps, in place of epochs; a stream needs it."""
    batch_size: int = Field(256, ge=2)
    """Rows a process and forward pass. With the contrastive loss the rows of all processes are candidates."""
    chunk_size: int | None = Field(None, ge=1)
    """Rows that go through the encoders at once; activations are made again for the backward pass. The loss, its
    candidates and the gradients stay those of the whole batch, so that it can be larger than its activations allow."""
    lr: float = Field(1e-3, gt=0)
    """Peak of the rate, after a linear warm-up; then a cosine down to 0."""
    warmup: float = Field(0.1, ge=0, lt=1)
    """Share of the steps."""
    weight_decay: float = Field(0.1, ge=0)
    """AdamW's, on weight matrices of the encoders alone: never on w, scales, biases and norms."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's."""
    clip_norm: float | None = Field(1.0, ge=0)
    """Largest gradient norm; 0 for no clipping."""
    accumulate: int = Field(1, ge=1)
    """Batches whose gradients are averaged before a step. This does not add negatives."""
    precision: Literal["no", "bf16"] = "no"
    """no or bf16: mixed precision of the encoders; scores and losses stay float32."""
    seed: int = Field(0, ge=0)
    """Of batch order, dropout, noise and shuffles; the caller's generators are left as they were."""
    workers: int = Field(0, ge=0)
    """Processes that read and decode."""
    cache_inputs: bool = False
    """Prepare every distinct raw value once and keep it in memory; for data that fit."""
    cache_features: bool = False
    """Run frozen backbones once over all rows and keep their features in memory: then only heads are trained."""
    compile: bool = False
    """Backbones through torch.compile; the first steps take minutes."""
    checkpoint_activations: bool = False
    """Towers of transformers and open_clip keep activations between layers alone, and make those inside again."""
    validate_every: int | None = Field(None, ge=1)
    """Optimiser steps; left out, once an epoch. Always at the end."""
    validation_rows: int = Field(1000, ge=2)
    """First rows of the validation data that are ranked against each other (memory grows with the square)."""
    checkpoint_every: int | None = Field(None, ge=1)
    """Optimiser steps; left out, at the end and on Ctrl-C alone."""
    report_every: int = Field(10, ge=1)
    """Optimiser steps a record of the history."""


class PretrainSettings(Settings):
    """How `pretrain` trains; in recipes with a [method] the table [train]."""

    epochs: int = Field(100, ge=1)
    """Passes over the data. Rows that do not fill a batch are left out of their epoch, others in each."""
    steps: int | None = Field(None, ge=1)
    """Optimiser steps, in place of epochs."""
    batch_size: int = Field(256, ge=2)
    """Rows a process; a view each of every row goes through the encoder at once."""
    lr: float = Field(2e-3, gt=0)
    """Peak of the rate, after a linear warm-up; then a cosine down to 0."""
    warmup: float = Field(0.1, ge=0, lt=1)
    """Share of the steps."""
    weight_decay: float = Field(1e-4, ge=0)
    """AdamW's, on weight matrices alone."""
    clip_norm: float | None = Field(None, ge=0)
    """Largest gradient norm; left out, no clipping."""
    precision: Literal["no", "bf16"] = "no"
    """no or bf16: mixed precision of the encoder; losses stay float32."""
    seed: int = Field(0, ge=0)
    """Of batch order and augmentations."""
    checkpoint_every: int | None = Field(None, ge=1)
    """Optimiser steps; left out, at the end and on Ctrl-C alone."""
    report_every: int = Field(10, ge=1)
    """Optimiser steps a record of the history."""
