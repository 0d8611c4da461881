"""The loop that trains a method."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmcl.batching import planned_steps, shuffled_batches
from mmcl.checkpoints import Checkpoints
from mmcl.losses.views import as_labels
from mmcl.methods.base import Method
from mmcl.methods.views import Source
from mmcl.modes import evaluating
from mmcl.progress import Record, Reporter
from mmcl.settings import checked
from mmcl.training import interruptible, make_accelerator, parameter_groups, step_seed, warmup_then_cosine
from mmcl.training_settings import PretrainSettings

FEATURE_ROWS = 256


@dataclass(frozen=True)
class PretrainResult:
    """What a run left behind."""

    steps: int
    history: list[Record]
    """One record a report: step, loss, lr, rows_per_second."""
    checkpoint: Path | None
    """The last checkpoint; out/model holds encoder.safetensors, the encoder alone."""


def pretrain(
    method: Method,
    source: Source,
    labels: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    log: str | None = None,
    progress: bool = True,
    **settings: Any,
) -> PretrainResult:
    """Train a method's encoder on views of a dataset's rows.

    Args:
        method: trained in place and left in evaluation mode.
        source: `TensorSource`, `ImageSource`, `AudioSource`, or anything with their three methods.
        labels: (rows,) integers, -1 where unknown; only SupCon looks at them.
        out: folder for checkpoints, history.json and the encoder (out/model). None keeps nothing.
        resume: go on from the last checkpoint in `out`.
        log: "tensorboard" writes out/tensorboard.
        settings: the fields of `PretrainSettings`.
    Raises: ValueError for data that cannot be used, or a loss that is not finite, naming the step; KeyboardInterrupt
        after the checkpoint of an interrupted run.
    """
    s = checked(PretrainSettings, settings, "pretrain")
    known = None if labels is None else as_labels(labels, len(source))
    accelerator = make_accelerator(s.precision, 1, unused=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    per_epoch, total = planned_steps(len(source), s.epochs, s.steps, s.batch_size, 1, world)
    assert per_epoch is not None
    optimiser = torch.optim.AdamW(parameter_groups(method, s.weight_decay), lr=s.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, warmup_then_cosine(total, s.warmup))
    wrapped, stepper = accelerator.prepare(method, optimiser)
    reporter = Reporter(total, out, log, show=progress, main=accelerator.is_main_process)
    made_of = {"processes": world, "rows": len(source), "method": type(method).__name__}
    store = Checkpoints(out, {**s.model_dump(), **made_of}, resume, accelerator.is_main_process)
    start = store.restore(method, optimiser, schedule, reporter)
    order = islice(shuffled_batches(len(source), s.batch_size, s.seed, rank, world), start, None)

    with torch.random.fork_rng(), interruptible() as interrupted, reporter:
        for step in range(start + 1, total + 1):
            torch.manual_seed(step_seed(s.seed, step, rank))  # a function of the step, so that a resumed run agrees
            if (step - 1) % per_epoch == 0:
                method.start_epoch(lambda: features(method, source))
                for parameter in method.fresh_parameters():
                    optimiser.state.pop(parameter, None)
            method.train()
            rows = next(order)
            views = [view.to(accelerator.device, non_blocking=True) for view in source.views(rows)]
            at = torch.as_tensor(rows, device=accelerator.device)
            given = None if known is None else known[rows].to(accelerator.device)
            loss = wrapped(views, rows=at, labels=given)
            accelerator.backward(loss)
            if s.clip_norm:
                accelerator.clip_grad_norm_(method.parameters(), s.clip_norm)
            stepper.step()
            stepper.zero_grad()
            method.after_step()
            schedule.step()
            reporter.add(loss.detach(), len(rows))
            last, broken_off = step == total, interrupted() and step < total
            if last or step % s.report_every == 0:
                reporter.record(step, float(schedule.get_last_lr()[0]))
            if last or broken_off or (s.checkpoint_every and step % s.checkpoint_every == 0):
                store.save(step, method, optimiser, schedule, reporter)
            if broken_off:
                raise KeyboardInterrupt(f"stopped after step {step} of {total}{store.hint()}")
    method.eval()
    store.save_final(method)
    return PretrainResult(total, reporter.history, store.latest())


@torch.no_grad()
def features(method: Method, source: Source, batch_size: int = FEATURE_ROWS) -> Tensor:
    """(rows, ...) what the encoder makes of every row as it is, in evaluation mode, on the CPU."""
    device = next(method.parameters()).device
    with evaluating(method):
        starts = range(0, len(source), batch_size)
        parts = [source.inputs(range(at, min(at + batch_size, len(source)))).to(device) for at in starts]
        return torch.cat([method.encoder(part).float().cpu() for part in parts])
