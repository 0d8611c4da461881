"""How well embeddings recover known latents: linear maps, single coordinates, angles."""

from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from mmcl.arrays import as_numpy


def linear_r2(embeddings: Any, latents: Any, held_out: float = 0.5) -> float:
    """R^2 of the linear regression (with intercept) from embeddings to latents, on rows that it was not fitted to.

    Args:
        embeddings: (n, d); latents: (n, k), rows that belong together.
        held_out: share of the rows, the last ones, that are predicted. They must come in no order.
    Returns: mean over latent dimensions of 1 - residual / variance; 1 where linear, 0 or less where nothing is known.
    Raises: ValueError for rows that do not belong together, or fewer to fit than d + 1.
    """
    h, z = checked_pair(embeddings, latents)
    first = round(len(h) * (1 - held_out))
    if not 0 < first < len(h) or first <= h.shape[1]:
        raise ValueError(f"{len(h)} rows with {held_out} held out leave {first} to fit {h.shape[1] + 1} numbers")
    design = np.column_stack([h, np.ones(len(h))])
    weights, *_ = np.linalg.lstsq(design[:first], z[:first], rcond=None)
    residual, rest = z[first:] - design[first:] @ weights, z[first:]
    variance = ((rest - rest.mean(0)) ** 2).sum(0)
    if (variance == 0).any():
        raise ValueError(f"latent {int(np.flatnonzero(variance == 0)[0])} does not vary; R^2 has no meaning there")
    return float((1 - (residual**2).sum(0) / variance).mean())


def mean_correlation(embeddings: Any, latents: Any, weak: bool = False) -> float:
    """MCC: mean |Pearson| of latents and embedding coordinates, matched one to one as well as can be.

    Args:
        embeddings: (n, d); latents: (n, k), k <= d.
        weak: after canonical correlation analysis, the mean canonical correlation: blind to linear maps.
    Returns: 0 to 1; 1 where each latent is a scaled coordinate. A coordinate that does not vary correlates 0.
    Source: Hyvarinen and Morioka 2016; weak, Roeder et al. 2021.
    """
    h, z = checked_pair(embeddings, latents)
    if z.shape[1] > h.shape[1]:
        raise ValueError(f"{z.shape[1]} latents cannot be matched with {h.shape[1]} coordinates one to one")
    if weak:
        return float(np.linalg.svd(_orthonormal(h).T @ _orthonormal(z), compute_uv=False)[: z.shape[1]].mean())
    correlations = matched_correlations(h, z)[1]
    return float(correlations.mean())


def matched_correlations(embeddings: Any, latents: Any) -> tuple[np.ndarray, np.ndarray]:
    """For each latent, (the coordinate that it is matched with, |Pearson| of the two)."""
    h, z = checked_pair(embeddings, latents)
    table = np.abs(_unit_columns(z).T @ _unit_columns(h))
    rows, columns = linear_sum_assignment(-table)
    return columns[np.argsort(rows)], table[rows, columns][np.argsort(rows)]


def angle_error(embeddings: Any, latents: Any) -> float:
    """APE: mean over pairs of rows, a row with itself left out, of |z_i.z_j - h_i.h_j| / 2, both of unit norm.

    Returns: 0 for an isometry; 1/3 for independent uniform rows on the sphere of R^3. O(n^2) memory.
    """
    h, z = checked_pair(embeddings, latents)
    gaps = np.abs(z @ z.T - h @ h.T)
    return float(gaps.sum() / (len(h) * (len(h) - 1)) / 2) - float(np.trace(gaps) / (len(h) * (len(h) - 1)) / 2)


def checked_pair(embeddings: Any, latents: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both as (n, width) float64; ValueError names the shapes otherwise, and the first row that is not finite."""
    pair = [as_numpy(each).astype(np.float64) for each in (embeddings, latents)]
    if any(each.ndim != 2 for each in pair) or len(pair[0]) != len(pair[1]) or len(pair[0]) < 2:
        shapes = [each.shape for each in pair]
        raise ValueError(f"expected (n, d) embeddings and (n, k) latents with n >= 2, got {shapes[0]} and {shapes[1]}")
    for name, each in zip(("embeddings", "latents"), pair, strict=True):
        bad = ~np.isfinite(each).all(1)
        if bad.any():
            raise ValueError(f"{name}: row {int(np.flatnonzero(bad)[0])} holds NaN or an infinite value")
    return pair[0], pair[1]


def _unit_columns(rows: np.ndarray) -> np.ndarray:
    centred = rows - rows.mean(0)
    lengths = np.linalg.norm(centred, axis=0)
    varies = lengths > 1e-12 * np.sqrt(len(rows)) * np.maximum(np.abs(rows).max(0), 1e-300)
    return np.where(varies, centred / np.where(varies, lengths, 1), 0.0)


def _orthonormal(rows: np.ndarray) -> np.ndarray:
    """An orthonormal basis of what the centred columns span."""
    u, s, _ = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    return u[:, s > 1e-10 * max(s.max(initial=0), 1e-300)]
