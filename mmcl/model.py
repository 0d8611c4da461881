"""A model: one encoder a modality and the score over them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import ModelHubMixin, snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from mmcl import __version__
from mmcl.arrays import as_rows, off_unit_norm, refuse_bad_rows, refuse_unknown
from mmcl.data import looks_local
from mmcl.decode import RowError
from mmcl.encoders import ENCODERS, Encoder
from mmcl.files import save_tensors
from mmcl.inputs import Inputs, input_length, is_prepared, map_inputs, take_rows
from mmcl.scores import Score, score_from_config
from mmcl.tables import lookup

FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
MODEL_CARD = """---
{{ card_data }}
---

A multimodal contrastive model. Load it with:

```python
from mmcl import MultimodalModel

model = MultimodalModel.from_pretrained("path or hub id of this folder")
```

Modalities, encoders and score stand in `config.json`.
"""


class MultimodalModel(
    nn.Module,
    ModelHubMixin,
    library_name="mmcl",
    tags=["multimodal", "contrastive-learning"],
    model_card_template=MODEL_CARD,
):
    """One encoder a modality, unit rows out of each, and a score over them.

    Args:
        encoders: {modality: Encoder or any nn.Module that maps a tensor of n rows to (n, score.dim)}. A module of
            one's own is normalised to unit rows here; where it has a method `prepare`, raw values go through it, else
            they are rows of numbers.
        score: over exactly these modalities.
    """

    def __init__(self, encoders: Mapping[str, Any], score: Score):
        super().__init__()
        refuse_unknown(encoders, score.modalities, "encoders")
        missing = [name for name in score.modalities if name not in encoders]
        if missing:
            raise KeyError(f"no encoder for modality {missing}; the score takes {list(score.modalities)}")
        # a list, as a dict of modules refuses names such as "type" or "v1.0"
        self.towers = nn.ModuleList(as_encoder(encoders[name], name, score.dim) for name in score.modalities)
        self.score = score

    @property
    def modalities(self) -> tuple[str, ...]:
        """In the score's order."""
        return self.score.modalities

    @property
    def encoders(self) -> dict[str, Encoder]:
        """{modality: encoder}."""
        return {name: cast(Encoder, tower) for name, tower in zip(self.modalities, self.towers, strict=True)}

    @property
    def device(self) -> torch.device:
        """Where the score, and so the model, lives."""
        return next(self.score.parameters()).device

    def forward(self, inputs: Mapping[str, Inputs]) -> dict[str, Tensor]:
        """{modality: (n, d)} unit rows of prepared inputs on the model's device: what training calls."""
        return {name: self.encoders[name](rows) for name, rows in inputs.items()}

    def encode(self, values: Mapping[str, Any], batch_size: int | None = None) -> dict[str, Tensor]:
        """Unit rows of raw values, or of tensors that are prepared already.

        Args:
            values: {modality: n raw values, a tensor of n rows, or a dict of such tensors}, any of the modalities.
            batch_size: rows encoded at once; None for all.
        Returns: {modality: (n, d)} on the model's device. Gradients and training mode are as the caller set them.
        Raises: KeyError for an unknown modality; ValueError naming modality and row for a value that cannot be used,
            and for an embedding that is not finite and of norm 1.
        """
        refuse_unknown(values, self.modalities, "values")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, or None for all rows at once, got {batch_size}")
        return {name: self._encode(name, rows, batch_size) for name, rows in values.items()}

    def _encode(self, name: str, values: Any, batch_size: int | None) -> Tensor:
        prepared = is_prepared(values)
        if not prepared:
            values = as_sequence(values, name)
        count = input_length(values) if prepared else len(values)
        parts = [torch.empty(0, self.score.dim, device=self.device)]
        step = batch_size or max(count, 1)
        for start in range(0, count, step):
            part = slice(start, start + step)
            inputs = take_rows(values, part) if prepared else values[part]
            inputs = self._fitted(name, inputs if prepared else self.prepare(name, inputs, range(start, count)))
            parts.append(self._checked(self._run(name, inputs), name, start))
        return torch.cat(parts[1:] or parts)

    def _run(self, name: str, inputs: Inputs) -> Tensor:
        try:
            return self.encoders[name](inputs)
        except Exception as error:
            error.add_note(f"while encoding {name!r}")
            raise

    def prepare(self, name: str, values: Any, rows: Sequence[int] | None = None, where: str | None = None) -> Inputs:
        """Inputs of one modality's backbone, on the CPU.

        Args:
            rows: numbers of the values' rows, for errors; default: 0, 1, 2 ...
            where: what errors call the modality; default: its name.
        Raises: ValueError naming the modality and the row of a value that cannot be used.
        """
        try:
            return self.encoders[name].prepare(values)
        except RowError as error:
            fault = error if rows is None else RowError(rows[error.row], error.reason)
            raise ValueError(f"{where or name}: {fault}") from error
        except ValueError as error:
            raise ValueError(f"{where or name}: {error}") from error

    def _fitted(self, name: str, inputs: Inputs) -> Inputs:
        """Inputs on the model's device, floats in the precision of the encoder's weights."""
        weights = (p.dtype for p in self.encoders[name].parameters() if p.is_floating_point())
        precision = next(weights, torch.float32)
        return map_inputs(lambda rows: rows.to(self.device, precision if rows.is_floating_point() else None), inputs)

    def _checked(self, rows: Tensor, name: str, offset: int) -> Tensor:
        rows = as_rows(rows, name, self.score.dim)
        refuse_bad_rows(rows, name, offset)
        off = off_unit_norm(rows)
        if off.any():
            raise ValueError(f"{name}: row {int(off.nonzero()[0]) + offset} is not of norm 1; encoders give unit rows")
        return rows

    def config(self) -> dict[str, Any]:
        """Score and encoders, JSON-serialisable; None for an encoder of the user's own."""
        encoders = {name: encoder.config for name, encoder in self.encoders.items()}
        return {"score": self.score.config(), "encoders": encoders}

    def fingerprint(self) -> str:
        """SHA-256 of the config and every weight: equal exactly where the embeddings are the same function."""
        digest = hashlib.sha256(json.dumps(self.config(), sort_keys=True).encode())
        for name, value in sorted(self.state_dict().items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **model_kwargs: Any) -> "MultimodalModel":
        """The model that `save_pretrained` wrote, in evaluation mode.

        Args:
            pretrained_model_name_or_path: its folder, or a hub id.
            model_kwargs: encoders={modality: module} for those that were the user's own modules, with the same weights'
                names; of huggingface_hub: revision, cache_dir, token, local_files_only, force_download.
        Raises: FileNotFoundError where there is none; ValueError for another format or weights that do not fit.
        """
        source = Path(pretrained_model_name_or_path)
        if source.is_dir():
            read_config(source)  # before huggingface_hub looks elsewhere for what is missing here
        elif looks_local(str(pretrained_model_name_or_path)):
            raise FileNotFoundError(f"no model folder at {str(source)!r}")
        try:
            return super().from_pretrained(pretrained_model_name_or_path, **model_kwargs)
        except (OSError, HFValidationError) as error:
            if source.is_dir():
                raise
            fault = f"no such folder, and not on the hub ({str(error).splitlines()[0]})"
            raise FileNotFoundError(f"no model at {str(pretrained_model_name_or_path)!r}: {fault}") from error

    def _save_pretrained(self, save_directory: Path) -> None:
        for name, encoder in self.encoders.items():
            if encoder.save_assets is not None:
                folder = assets_folder(save_directory, self.modalities, name)
                folder.mkdir(parents=True, exist_ok=True)
                encoder.save_assets(folder)
        save_tensors(self.state_dict(), save_directory / WEIGHTS)
        content = {"format_version": FORMAT_VERSION, "mmcl_version": __version__, "model": self.config()}
        (save_directory / "config.json").write_text(json.dumps(content, indent=2), encoding="utf-8")

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        encoders: Mapping[str, nn.Module] | None = None,
        **unknown: Any,
    ) -> "MultimodalModel":
        if unknown:
            raise TypeError(f"from_pretrained takes encoders={{modality: module}}, not {sorted(unknown)}")
        folder = Path(model_id)
        if not folder.is_dir():
            downloaded = snapshot_download(
                model_id,
                revision=revision,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
                token=token,
            )
            folder = Path(str(downloaded))
        config = read_config(folder)
        model = cls(build_encoders(folder, config, encoders or {}), score_from_config(config["score"]))
        load_weights(model, folder / WEIGHTS, assign=True)
        return model.eval()


def load_weights(model: nn.Module, file: Path, assign: bool) -> None:
    """Set all weights to those of the file; ValueError names the first that does not fit.

    assign: take over the file's precision. The parameters are then new tensors, which no optimiser knows; copies, for
        in the file's map they are not aligned as new ones are, and products then differ in the last bit.
    """
    try:
        state = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    device = next(model.parameters()).device
    try:
        model.load_state_dict({name: value.to(device, copy=True) for name, value in state.items()}, assign=assign)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"{file} does not fit its config: {' '.join(lines[:2])[:500]}") from error


def as_encoder(module: Any, name: str, dim: int) -> Encoder:
    """`module` itself where it is an Encoder of the right width, else wrapped into one that normalises."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"the encoder of {name!r} must be an nn.Module, got {type(module).__name__}")
    if not isinstance(module, Encoder):
        return Encoder(module, dim, prepare=getattr(module, "prepare", None))
    if module.dim != dim:
        raise ValueError(f"the encoder of {name!r} gives {module.dim} columns, the score takes {dim}")
    return module


def as_sequence(values: Any, name: str) -> Any:
    """Raw values of n rows as something that can be counted and sliced."""
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise ValueError(f"{name}: expected a list of raw values, one a row, got {type(values).__name__}")
    return values


def assets_folder(folder: Path, modalities: tuple[str, ...], name: str) -> Path:
    """By position, as a modality's name need not be a file name."""
    return folder / "encoders" / str(modalities.index(name))


def read_config(folder: Path) -> dict[str, Any]:
    """The model's part of config.json; ValueError for a foreign or newer file."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json; is it a folder that save_pretrained wrote?")
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{path}: format version {content.get('format_version')!r}, this mmcl reads {FORMAT_VERSION}")
    return content["model"]


def build_encoders(folder: Path, config: dict[str, Any], given: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Encoders at their random start; weights come afterwards. `given` stands in for those of the user's own."""
    names = tuple(score_from_config(config["score"]).modalities)
    refuse_unknown(given, names, "encoders")
    encoders: dict[str, nn.Module] = {}
    for name in names:
        options = config["encoders"][name]
        if name in given:
            encoders[name] = given[name]
        elif options is None:
            raise ValueError(
                f"the encoder of {name!r} was your own module: from_pretrained(..., encoders={{{name!r}: it}})"
            )
        else:
            options = dict(options)
            build = lookup(ENCODERS, options.pop("name"), "encoder")
            assets = assets_folder(folder, names, name)
            if assets.is_dir():
                options |= {"source": str(assets), "load_weights": False}
            encoders[name] = build(**options)
    return encoders
