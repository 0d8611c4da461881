"""Towers from Hugging Face transformers: any local folder or hub id, with stated pooling."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmcl.decode import decode_audio, decode_image, decode_rows, decode_text
from mmcl.encoders.base import Encoder
from mmcl.encoders.small import fit_length
from mmcl.tables import lookup

UNUSED_PARTS = {
    "text": ("vision_model", "visual_projection", "audio_model", "audio_projection"),
    "image": ("text_model", "text_projection"),
    "audio": ("text_model", "text_projection"),
}
"""Parts of two-tower models (CLIP, SigLIP, CLAP) that an encoder of the modality drops."""


def transformers_text(
    source: str,
    dim: int | None = None,
    pooling: str = "auto",
    max_length: int | None = None,
    head: str = "auto",
    frozen: bool = False,
    load_weights: bool = True,
) -> Encoder:
    """A text model of transformers with its tokenizer.

    Args:
        source: a local folder or a hub id.
        dim, head, frozen: see `Encoder`. With dim=None the embedding is the pooled output, normalised.
        pooling: "mean" over the attended tokens, "cls" the first token, "last" the last attended token, "pooler" the
            model's own pooler, "features" the projected output of a two-tower model; "auto" takes "features" where
            the model has it, else "mean".
        max_length: in tokens; longer texts are cut. None: what the model or its sentence-transformers file states.
        load_weights: False keeps a random start, whatever `source` holds.
    Raises: ValueError naming the first key where weights are missing or of another architecture.
    """
    from transformers import AutoTokenizer

    tower = load_tower(source, "text", pooling, default="mean", load_weights=load_weights)
    tokenizer = AutoTokenizer.from_pretrained(source)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    length = max_length or stated_length(source, tokenizer, tower.model.config)
    prepare = partial(prepare_texts, tokenizer=tokenizer, max_length=length)
    config = {"name": "transformers_text", "dim": dim, "pooling": tower.pooling, "max_length": length}
    return _encoder(tower, prepare, "a", tokenizer, dim, head, frozen, config)


def transformers_image(
    source: str,
    dim: int | None = None,
    pooling: str = "auto",
    head: str = "auto",
    frozen: bool = False,
    load_weights: bool = True,
) -> Encoder:
    """An image model of transformers with its image processor.

    Args: as `transformers_text`. pooling "auto" takes "features" where the model has it, else "cls"; feature maps of
        convolutional models are averaged over space by "mean".
    """
    from PIL import Image
    from transformers import AutoImageProcessor

    tower = load_tower(source, "image", pooling, default="cls", load_weights=load_weights)
    processor = AutoImageProcessor.from_pretrained(source)
    config = {"name": "transformers_image", "dim": dim, "pooling": tower.pooling}
    example = Image.new("RGB", (32, 32))
    return _encoder(tower, partial(prepare_images, processor=processor), example, processor, dim, head, frozen, config)


def transformers_audio(
    source: str,
    dim: int | None = None,
    pooling: str = "auto",
    seconds: float = 10.0,
    head: str = "auto",
    frozen: bool = False,
    load_weights: bool = True,
) -> Encoder:
    """An audio model of transformers (wav2vec2, HuBERT, AST, CLAP, a Whisper encoder) with its feature extractor.

    Args: as `transformers_text`. pooling "auto" takes "features" where the model has it, else "mean" over frames.
        seconds: every sound is cut or padded with silence to this length, so that no answer depends on the batch.
    """
    from transformers import AutoFeatureExtractor

    tower = load_tower(source, "audio", pooling, default="mean", load_weights=load_weights)
    extractor = AutoFeatureExtractor.from_pretrained(source)
    prepare = partial(prepare_sounds, extractor=extractor, seconds=seconds)
    config = {"name": "transformers_audio", "dim": dim, "pooling": tower.pooling, "seconds": seconds}
    example = {"array": [0.0] * extractor.sampling_rate, "sampling_rate": extractor.sampling_rate}
    return _encoder(tower, prepare, example, extractor, dim, head, frozen, config)


def prepare_texts(values: Any, tokenizer: Any, max_length: int) -> dict[str, Tensor]:
    """Token ids and, where the model takes it, the attention mask."""
    # a model without attention mask was trained on texts of full length, and would see the padding of a batch
    padding = "longest" if "attention_mask" in tokenizer.model_input_names else "max_length"
    texts = decode_rows(values, decode_text)
    return dict(tokenizer(texts, padding=padding, truncation=True, max_length=max_length, return_tensors="pt"))


def prepare_images(values: Any, processor: Any) -> dict[str, Tensor]:
    """Pixel values, by the model's own processor."""
    return {"pixel_values": processor(decode_rows(values, decode_image), return_tensors="pt")["pixel_values"]}


def prepare_sounds(values: Any, extractor: Any, seconds: float) -> dict[str, Tensor]:
    """Waveforms or spectrograms of one stated length."""
    rate = extractor.sampling_rate
    samples = round(rate * seconds)
    waves = decode_rows(values, lambda value: fit_length(decode_audio(value, rate), samples).numpy())
    features = extractor(waves, sampling_rate=rate, return_tensors="pt")
    return {key: features[key] for key in ("input_values", "input_features") if key in features}


class TransformersTower(nn.Module):
    """A transformers model and the pooling of its output, as a backbone."""

    def __init__(self, model: Any, modality: str, pooling: str):
        super().__init__()
        self.model = model
        self.modality = modality
        self.pooling = pooling

    def forward(self, inputs: dict[str, Tensor]) -> Float[Tensor, "n width"]:
        if self.pooling == "features":
            features = getattr(self.model, f"get_{self.modality}_features")(**inputs)
            return features if isinstance(features, Tensor) else features.pooler_output
        output = self.model(**inputs)
        if self.pooling == "pooler":
            return output.pooler_output.flatten(1)
        states = output.last_hidden_state
        if states.ndim == 4:  # a feature map (n, width, h, w)
            states = states.flatten(2).transpose(1, 2)
        mask = inputs.get("attention_mask")
        mask = torch.ones_like(states[..., 0]) if mask is None else mask.to(states.dtype)
        return lookup(POOLING, self.pooling, "pooling")(states, mask)


def mean_pooling(states: Float[Tensor, "n tokens width"], mask: Float[Tensor, "n tokens"]) -> Float[Tensor, "n width"]:
    """Average over the attended tokens."""
    return (states * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True).clamp(min=1e-9)


def cls_pooling(states: Float[Tensor, "n tokens width"], mask: Float[Tensor, "n tokens"]) -> Float[Tensor, "n width"]:
    """The first token."""
    return states[:, 0]


def last_pooling(states: Float[Tensor, "n tokens width"], mask: Float[Tensor, "n tokens"]) -> Float[Tensor, "n width"]:
    """The last attended token, whichever side is padded."""
    positions = torch.arange(states.shape[1], device=states.device)
    return states[torch.arange(len(states), device=states.device), (mask * positions).argmax(1)]


POOLING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": mean_pooling,
    "cls": cls_pooling,
    "last": last_pooling,
}
STATED_POOLING = (*POOLING, "features", "pooler", "auto")


def load_tower(source: str, modality: str, pooling: str, default: str, load_weights: bool) -> TransformersTower:
    """The model of `source`, less the parts that this modality does not use."""
    from transformers import AutoConfig, AutoModel

    lookup(dict.fromkeys(STATED_POOLING), pooling, "pooling")
    if Path(source).is_absolute() and not Path(source).is_dir():
        raise FileNotFoundError(f"no model folder at {source!r}")
    if load_weights:
        # mismatched shapes are reported, and refused below by name
        options: dict[str, Any] = {
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,
            "dtype": torch.float32,
        }
        model, report = AutoModel.from_pretrained(source, **options)
        refuse_random_parts(source, report, modality, pooling)
    else:
        model = AutoModel.from_config(AutoConfig.from_pretrained(source))
    features = hasattr(model, f"get_{modality}_features")
    if pooling == "features" and not features:
        raise ValueError(f"{type(model).__name__} has no projected {modality} features; choose another pooling")
    if getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()
    for part in UNUSED_PARTS[modality]:
        if hasattr(model, part):
            delattr(model, part)
    chosen = ("features" if features else default) if pooling == "auto" else pooling
    return TransformersTower(model.eval(), modality, chosen)


def refuse_random_parts(source: str, report: dict[str, Any], modality: str, pooling: str) -> None:
    """ValueError that names the first weight the checkpoint lacks; an unused pooler may be missing."""
    missing = sorted(key for key in report["missing_keys"] if pooling == "pooler" or ".pooler." not in f".{key}")
    missing = [key for key in missing if key.split(".")[0] not in UNUSED_PARTS[modality]]
    wrong = sorted(str(each[0] if isinstance(each, tuple) else each) for each in report["mismatched_keys"])
    if missing or wrong:
        first = wrong[0] if wrong else missing[0]
        raise ValueError(
            f"{source}: the weights are of another architecture; first key that does not fit: {first!r} "
            f"({len(missing)} missing, {len(wrong)} of another shape)"
        )


def stated_length(source: str, tokenizer: Any, config: Any) -> int:
    """Tokens that the model takes: the least of what its files state."""
    stated = [
        tokenizer.model_max_length,
        getattr(getattr(config, "text_config", config), "max_position_embeddings", None),
    ]
    file = Path(source) / "sentence_bert_config.json"
    if file.is_file():
        stated.append(json.loads(file.read_text(encoding="utf-8")).get("max_seq_length"))
    lengths = [length for length in stated if length and length < 10**9]
    return min(lengths) if lengths else 512


def _encoder(
    tower: TransformersTower,
    prepare: Callable[[Any], dict[str, Tensor]],
    example: Any,
    processor: Any,
    dim: int | None,
    head: str,
    frozen: bool,
    config: dict[str, Any],
) -> Encoder:
    with torch.no_grad():
        width = tower(prepare([example])).shape[1]  # the one statement of the width that holds for every model

    def save(folder: Path) -> None:
        full_config.save_pretrained(folder)
        processor.save_pretrained(folder)

    full_config = tower.model.config
    return Encoder(tower, width, dim, prepare, head, frozen, {**config, "head": head, "frozen": frozen}, save)
