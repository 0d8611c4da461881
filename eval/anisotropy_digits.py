"""The part of `anisotropy.py` on real pictures, and its figure."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from anisotropy import Concentrations
from self_supervised import digits
from self_supervised_models import cnn
from torch import Tensor, nn

from mmcl.losses import an_info_nce, info_nce
from mmcl.methods import SimCLR, TensorSource, features, pretrain
from mmcl.methods.views import RandomViews
from mmcl.metrics import linear_probe, linear_r2

PARTS = [(loss, crop) for crop in (0.25, 0.5) for loss in ("info_nce", "an_info_nce")]
EPOCHS, DIM, TEMPERATURE = 80, 16, 0.5


class Contrast(SimCLR):
    """Both views' rows against the other view's, by InfoNCE or AnInfoNCE with learned concentrations."""

    def __init__(self, encoder: nn.Module, width: int, anisotropic: bool):
        super().__init__(encoder, width, DIM, TEMPERATURE)
        self.scales = Concentrations(torch.full((DIM,), 1 / TEMPERATURE)) if anisotropic else None

    def forward(self, views: Any, rows: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        a, b = self.project(views)
        if self.scales is None:
            return (info_nce(a, b, scale=1 / TEMPERATURE) + info_nce(b, a, scale=1 / TEMPERATURE)) / 2
        scales = self.scales()
        return (an_info_nce(a, b, scales) + an_info_nce(b, a, scales)) / 2


def collapsed(loss: str, crop: float) -> dict[str, Any]:
    """What z keeps of the augmentation's own numbers (how far the picture was moved and cropped), and of the class."""
    pictures = digits()
    torch.manual_seed(0)
    augment = RandomViews(crop=crop, degrees=15.0, shift=0.15, stretch=0.2, brightness=0.3, noise=0.1)
    method = Contrast(*cnn(tuple(pictures.train.shape[1:])), loss == "an_info_nce")
    pretrain(method, TensorSource(pictures.train, augment), progress=False, epochs=EPOCHS)
    kept, numbers = moved(method, pictures.train)
    h = {part: features(method, TensorSource(getattr(pictures, part), nn.Identity())) for part in ("train", "test")}
    with torch.no_grad():
        z = {part: method.project([rows])[0] for part, rows in (("train", pictures.train), ("test", pictures.test))}
    probes: dict[str, list[float]] = {"h": [], "z": []}
    for number in range(10):
        chosen = pictures.draw(number)
        for name, rows in (("h", h), ("z", z)):
            known = (rows["train"][chosen], pictures.train_labels[chosen], rows["test"], pictures.test_labels)
            probes[name].append(linear_probe(*known))
    learned = [] if method.scales is None else sorted(method.scales().detach().tolist())
    about = {"probe": float(np.mean(probes["z"])), "probe_h": float(np.mean(probes["h"])), "learned": learned}
    return {**about, "augmentation_r2": linear_r2(kept, numbers)}


@torch.no_grad()
def moved(method: SimCLR, images: Tensor) -> tuple[Tensor, Tensor]:
    """(z of pictures that were shifted and cropped by known amounts, those amounts: right, down, side)."""
    generator = torch.Generator().manual_seed(5)
    count = 4 * len(images)
    numbers = torch.rand(count, 3, generator=generator)
    side, place = 1 - 0.25 * numbers[:, 2], 0.6 * numbers[:, :2] - 0.3
    zero = torch.zeros(count)
    rows = [torch.stack([side, zero, place[:, 0]], 1), torch.stack([zero, side, place[:, 1]], 1)]
    grid = nn.functional.affine_grid(torch.stack(rows, 1), [count, *images.shape[1:]], align_corners=False)
    seen = nn.functional.grid_sample(images.repeat(4, 1, 1, 1), grid, align_corners=False)
    order = torch.randperm(count, generator=generator)
    method.eval()
    return method.project([seen])[0][order], numbers[order]


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    """MCC by world and loss; learned against true concentrations; what z keeps, class against augmentation."""
    import matplotlib.pyplot as plt

    plot, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2), width_ratios=(2, 1.2, 1.2))
    mixed = [row for row in rows if row["part"] == "mixing"]
    names = list(dict.fromkeys((row["world"], tuple(row["concentrations"]), row["seed"]) for row in mixed))
    for shift, (loss, colour) in enumerate((("info_nce", "#9aa5b1"), ("an_info_nce", "#4878a8"))):
        of = {(r["world"], tuple(r["concentrations"]), r["seed"]): r["mcc"] for r in mixed if r["loss"] == loss}
        left.bar(
            [i + 0.4 * (shift - 0.5) for i in range(len(names))], [of[n] for n in names], 0.38, color=colour, label=loss
        )
    ticks = [f"{w.replace('_', ' ')}\n{min(c):g}..{max(c):g}, n {len(c)}\nseed {s}" for w, c, s in names]
    left.set_xticks(range(len(names)), ticks, fontsize=6.5)
    left.set_ylabel("MCC")
    left.legend(fontsize=7, frameon=False, loc="lower right")
    for row in rows:
        if "ratios" in row and row["part"] != "collapsed":
            true = np.array(row["concentrations"])
            middle.plot(true, true * np.array(row["ratios"]), "o", ms=3)
    middle.plot([0, 50], [0, 50], color="black", lw=0.8)
    middle.set_xlabel("true concentration")
    middle.set_ylabel("learned")
    for row in (row for row in rows if row["part"] == "collapsed"):
        colour = "#4878a8" if row["loss"] == "an_info_nce" else "#9aa5b1"
        right.plot(row["augmentation_r2"], row["probe"], "o" if row["crop"] < 0.4 else "s", color=colour)
        right.annotate(f"{row['loss']}, crop {row['crop']}", (row["augmentation_r2"], row["probe"]), fontsize=7)
    right.set_xlabel("$R^2$ of the augmentation's numbers from z")
    right.set_ylabel("linear probe of z")
    plot.tight_layout()
    plot.savefig(path, dpi=130)
    plt.close(plot)
