"""Training: one loop, on one process or many (accelerate)."""

import inspect
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmcl.batching import Batch, BatchMaker, batches, planned_steps
from mmcl.checkpoints import Checkpoints
from mmcl.chunks import encode_in_chunks
from mmcl.inputs import map_inputs
from mmcl.losses import TUPLE_LOSSES
from mmcl.model import MultimodalModel
from mmcl.progress import Record, Reporter
from mmcl.settings import checked
from mmcl.tables import lookup
from mmcl.towers import checkpointed_towers, compiled_towers
from mmcl.training_settings import FitSettings
from mmcl.validation import validate


@dataclass(frozen=True)
class FitResult:
    """What a run left behind."""

    steps: int
    """Optimiser steps in all."""
    history: list[Record]
    """One record a report: step, loss (mean since the last record, nats), lr, rows_per_second; validation_..."""
    checkpoint: Path | None
    """The last checkpoint."""


def fit(
    model: MultimodalModel,
    dataset: Any,
    columns: Mapping[str, str] | None = None,
    loss: str = "contrastive",
    epochs: int = 5,
    batch_size: int = 256,
    lr: float = 1e-3,
    out: str | Path | None = None,
    *,
    groups: Mapping[str, str] | None = None,
    validation: Any = None,
    resume: bool = False,
    log: str | None = None,
    progress: bool = True,
    **settings: Any,
) -> FitResult:
    """Train a model's encoders and score.

    Args:
        model: trained in place and left in evaluation mode. Only parameters that require gradients move.
        dataset: `datasets.Dataset`, or `datasets.IterableDataset` (then give `steps`).
        columns: {modality: column}; default: columns named as the modalities.
        loss, epochs, batch_size, lr, settings: the fields of `FitSettings`.
        out: folder for checkpoints, history.json and the final model (out/model). None keeps nothing.
        groups: {modality: "equal" or a column}, rows of one answer; see `contrastive_loss`.
        validation: a dataset of the same columns: loss, and retrieval of each modality from the others.
        resume: go on from the last checkpoint in `out`, to the bit as if never interrupted (on a CPU).
        log: "tensorboard" writes out/tensorboard.
        progress: show a progress bar.
    Raises: KeyError for unknown names; ValueError for data that cannot be used, naming modality and row, and for a
        loss that is not finite, naming the step; KeyboardInterrupt after the checkpoint of an interrupted run.
    """
    chosen = {"loss": loss, "epochs": epochs, "batch_size": batch_size, "lr": lr, **settings}
    s = checked(FitSettings, chosen, "fit")
    accelerator = make_accelerator(s.precision, s.accumulate, unused=has_neutral(model))
    rank, world = accelerator.process_index, accelerator.num_processes
    maker = BatchMaker(model, dataset, columns, groups, s.cache_inputs)
    objective = Objective(model, s.loss, s.loss_options, maker.groups, world > 1, s.chunk_size)
    per_epoch, total = planned_steps(maker.count, s.epochs, s.steps, s.batch_size, s.accumulate, world)
    optimiser = torch.optim.AdamW(parameter_groups(model, s.weight_decay), lr=s.lr, betas=s.betas, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, warmup_then_cosine(total, s.warmup))
    wrapped, stepper = accelerator.prepare(objective, optimiser)
    if s.cache_features:
        maker.keep_features()
    reporter = Reporter(total, out, log, show=progress, main=accelerator.is_main_process)
    made_of = {"processes": world, "rows": maker.count, "columns": maker.columns, "groups": maker.groups}
    store = Checkpoints(out, {**s.model_dump(), **made_of}, resume, accelerator.is_main_process)
    start = store.restore(model, optimiser, schedule, reporter)
    source = batches(maker, s.batch_size, s.seed, s.workers, rank, world, start * s.accumulate)

    with torch.random.fork_rng(), towers_as_asked(model, s), interruptible() as interrupted, reporter:
        for step in range(start + 1, total + 1):
            model.train()
            torch.manual_seed(step_seed(s.seed, step, rank))  # a function of the step, so that a resumed run agrees
            for batch in islice(source, s.accumulate):
                with accelerator.accumulate(wrapped):
                    value = wrapped(*to_device(batch, accelerator.device), step_seed(s.seed, step))
                    accelerator.backward(value)
                    if accelerator.sync_gradients and s.clip_norm:
                        accelerator.clip_grad_norm_(objective.parameters(), s.clip_norm)
                    stepper.step()
                    stepper.zero_grad()
                reporter.add(value.detach(), len(batch.rows))
            schedule.step()
            model.score.clamp_scales_()
            last, broken_off = step == total, interrupted() and step < total
            if last or step % s.report_every == 0:
                reporter.record(step, float(schedule.get_last_lr()[0]))
            if validation is not None and (last or step % (s.validate_every or per_epoch or total) == 0):
                reporter.add_validation(step, validate(model, validation, columns, groups, s.validation_rows, s.seed))
            if last or broken_off or (s.checkpoint_every and step % s.checkpoint_every == 0):
                store.save(step, model, optimiser, schedule, reporter)
            if broken_off:
                raise KeyboardInterrupt(f"stopped after step {step} of {total}{store.hint()}")
    model.eval()
    store.save_final(model)
    return FitResult(total, reporter.history, store.latest())


@contextmanager
def towers_as_asked(model: MultimodalModel, settings: FitSettings) -> Iterator[None]:
    """How the settings say that encoders run."""
    with ExitStack() as stack:
        if settings.checkpoint_activations:
            stack.enter_context(checkpointed_towers(model))
        if settings.compile:
            stack.enter_context(compiled_towers(model))
        yield


class Objective(nn.Module):
    """Model and loss as one module, so that wrappers for many processes see a single forward."""

    def __init__(
        self,
        model: MultimodalModel,
        loss: str,
        options: Mapping[str, Any],
        groups: Mapping[str, str],
        gather: bool,
        chunk_size: int | None = None,
    ):
        super().__init__()
        self.model, self.chunk_size = model, chunk_size
        self.function = lookup(TUPLE_LOSSES, loss, "loss")
        self.options = dict(options)
        refuse_unknown_options(loss, self.function, options)
        self.contrastive = loss == "contrastive"
        self.random = loss != "pairwise"
        if groups and not self.contrastive:
            raise ValueError(f"groups go with loss 'contrastive', not with {loss!r}")
        if gather and self.contrastive:
            self.options["gather"] = True

    def forward(self, inputs: dict[str, Any], groups: dict[str, Tensor], seed: int) -> Tensor:
        options: dict[str, Any] = {"groups": groups} if self.contrastive else {}
        if self.random:
            options["generator"] = torch.Generator().manual_seed(seed)
        encoded = encode_in_chunks(self.model, inputs, self.chunk_size) if self.chunk_size else self.model(inputs)
        return self.function(self.model.score, encoded, **options, **self.options)


def refuse_unknown_options(loss: str, function: Callable[..., Tensor], options: Mapping[str, Any]) -> None:
    """ValueError that lists the options of a loss which a run may set; embeddings, groups and seed come from it."""
    set_by_fit = {"score", "embeddings", "groups", "generator", "gather"}
    known = [name for name in inspect.signature(function).parameters if name not in set_by_fit]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"loss_options: unknown option {unknown[0]!r} of loss {loss!r}; it takes {known}")


def make_accelerator(precision: str, accumulate: int, unused: bool) -> Any:
    """An `Accelerator`, with a precision of its own also where an earlier run in this process used another.

    unused: whether some parameters may get no gradient in a step, as neutral vectors where nothing is missing.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    # without being told, accelerate trains a model of its own in each process that torchrun starts on CPUs
    on_cpus = launched > 1 and not torch.accelerator.is_available()
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=unused)]
    return Accelerator(
        mixed_precision=precision, gradient_accumulation_steps=accumulate, kwargs_handlers=handlers, cpu=on_cpus
    )


def has_neutral(model: MultimodalModel) -> bool:
    """Whether the score learns neutral vectors."""
    return any(name.rpartition(".")[2] == "neutral" for name, _ in model.score.named_parameters())


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight matrices of the encoders decay; w, scales, neutral vectors, biases and norms do not."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ValueError("no parameter requires gradients: every part of the model is frozen")
    decayed = [p for name, p in trained if p.ndim >= 2 and not name.startswith("score.")]
    others = [p for name, p in trained if p.ndim < 2 or name.startswith("score.")]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def warmup_then_cosine(total: int, warmup: float) -> Callable[[int], float]:
    """Factor of the rate after a number of steps: linear up over `warmup * total`, then half a cosine to 0."""
    rising = max(1, round(total * warmup))

    def factor(step: int) -> float:
        if warmup and step < rising:
            return (step + 1) / rising
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rising) / max(1, total - rising))))

    return factor


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """A seed of its own for each step and process."""
    return (seed * 1_000_003 + step) * 4096 + rank


def to_device(batch: Batch, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(inputs, groups) of a batch where the model is."""

    def move(rows: Tensor) -> Tensor:
        return rows.to(device, non_blocking=True)

    inputs = {name: map_inputs(move, value) for name, value in batch.inputs.items()}
    return inputs, {name: move(ids) for name, ids in batch.groups.items()}


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Inside, a first Ctrl-C only sets the flag that the yielded function reads; a second one interrupts at once."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def remember(number: int, frame: Any) -> None:
        flag.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, remember)
    try:
        yield flag.is_set
    finally:
        signal.signal(signal.SIGINT, before)
