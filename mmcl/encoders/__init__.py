"""Encoders: one row of `ENCODERS` each, a function from plain options to an `Encoder`."""

from mmcl.encoders.base import Encoder
from mmcl.encoders.open_clip_towers import open_clip_image, open_clip_text
from mmcl.encoders.small import categories, small_audio, small_image, vectors
from mmcl.encoders.transformers_towers import transformers_audio, transformers_image, transformers_text

ENCODERS = {
    function.__name__: function
    for function in (
        open_clip_image,
        open_clip_text,
        transformers_image,
        transformers_text,
        transformers_audio,
        small_image,
        small_audio,
        vectors,
        categories,
    )
}
"""What recipes and `mmcl list encoders` choose from. A new modality is one more row."""

__all__ = ["ENCODERS", "Encoder", *ENCODERS]
