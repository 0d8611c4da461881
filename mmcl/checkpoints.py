"""Checkpoints of a training run: weights as safetensors, the rest read with `weights_only=True`. No pickle."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmcl.files import refuse_file, save_tensors
from mmcl.model import WEIGHTS, load_weights
from mmcl.progress import Reporter

STATE = "state.pt"
KEPT = 2
"""Checkpoints kept; older ones are removed once a newer is whole."""
FREE = frozenset({"checkpoint_every", "report_every", "validate_every", "validation_rows", "workers", "cache_inputs"})
"""Settings that a resumed run may change: they do not touch the parameters."""


class Checkpoints:
    """The checkpoints of one run, under out/checkpoints/step-00000600.

    Args:
        out: the run's folder; None keeps nothing.
        settings: what the parameters depend on; a resumed run must have the same.
        resume: go on from the last checkpoint, if there is one. Otherwise a folder that holds a run is refused.
        main: whether this process writes.
    """

    def __init__(self, out: str | Path | None, settings: dict[str, Any], resume: bool, main: bool):
        self.out = None if out is None else Path(out)
        self.folder = None if self.out is None else self.out / "checkpoints"
        self.settings = json.loads(json.dumps({k: v for k, v in settings.items() if k not in FREE}))
        self.resume = resume
        self.main = main
        if resume and out is None:
            raise ValueError("resume=True needs `out`, the folder of the run to go on with")
        if self.out is not None:
            refuse_file(self.out, "a run is kept")
        if self.latest() is not None and not resume:
            raise ValueError(f"{self.out} holds a run already; pass resume=True (--resume) or another folder")

    def latest(self) -> Path | None:
        """The last whole checkpoint."""
        found = sorted(self.folder.glob("step-*")) if self.folder is not None else []
        return found[-1] if found else None

    def restore(self, model: nn.Module, optimiser: Any, schedule: Any, reporter: Reporter) -> int:
        """Set all of them to the last checkpoint; returns the steps done, 0 where there is none."""
        path = self.latest()
        if path is None:
            return 0
        state = torch.load(path / STATE, weights_only=True, map_location="cpu")
        differing = sorted(key for key in self.settings if state["settings"].get(key) != self.settings[key])
        if differing:
            key = differing[0]
            then, now = state["settings"].get(key), self.settings[key]
            raise ValueError(f"{path} was made with {key} = {then!r}, now it is {now!r}; resume with the same settings")
        load_weights(model, path / WEIGHTS, assign=False)
        optimiser.load_state_dict(state["optimiser"])
        schedule.load_state_dict(state["schedule"])
        reporter.load_state(state["reporter"])
        return state["step"]

    def save(self, step: int, model: nn.Module, optimiser: Any, schedule: Any, reporter: Reporter) -> None:
        """Write a checkpoint beside the others, whole or not at all, and the history."""
        if self.folder is None or not self.main:
            return
        draft = self.folder / f"draft-{step:08d}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        save_tensors(model.state_dict(), draft / WEIGHTS)
        state = {"step": step, "settings": self.settings, "reporter": reporter.state()}
        state |= {"optimiser": optimiser.state_dict(), "schedule": schedule.state_dict()}
        torch.save(state, draft / STATE)
        target = self.folder / f"step-{step:08d}"
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        for old in sorted(self.folder.glob("step-*"))[:-KEPT]:
            shutil.rmtree(old)
        self._write_history(reporter)

    def save_final(self, model: Any) -> None:
        """The trained model, as out/model."""
        if self.out is not None and self.main:
            model.save_pretrained(self.out / "model")

    def hint(self) -> str:
        """How to go on after an interruption."""
        path = self.latest()
        return "" if path is None else f"; checkpoint {path}, go on with resume=True (--resume)"

    def _write_history(self, reporter: Reporter) -> None:
        assert self.out is not None
        (self.out / "history.json").write_text(json.dumps(reporter.history, indent=1), encoding="utf-8")
