"""A batch through its encoders in chunks: exact gradients of a loss over the whole batch, in the memory of a chunk.

The loss needs all embeddings at once, but of the encoders' activations only those of the chunk whose gradient is being
made: they are thrown away, and made again in the backward pass, under the same random numbers (Gao et al. 2021,
"Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup").
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmcl.arrays import same_length
from mmcl.inputs import Inputs, input_length, take_rows

Encode = Callable[[dict[str, Inputs]], dict[str, Tensor]]


def encode_in_chunks(encode: Encode, inputs: Mapping[str, Inputs], chunk_size: int) -> dict[str, Tensor]:
    """{modality: (n, d)}, as `encode(inputs)` returns them, of `chunk_size` rows at a time.

    Value and gradients are those of the whole batch wherever rows do not see each other inside an encoder: batch
    normalisation sees a chunk, and moves its running statistics twice.

    Args:
        encode: {modality: inputs} -> {modality: (n, d)}, such as a `MultimodalModel`.
        inputs: prepared; every tensor has n rows, other fields of a dict go to every chunk as they are.
        chunk_size: rows of each modality, encoded together.
    Raises: ValueError for a chunk size below 1, and for modalities of different lengths.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    count = same_length({name: range(input_length(rows)) for name, rows in inputs.items()})
    if count <= chunk_size:
        return encode(dict(inputs))
    parts = []
    for start in range(0, count, chunk_size):
        part = {name: take_rows(rows, slice(start, start + chunk_size)) for name, rows in inputs.items()}
        parts.append(checkpoint(encode, part, use_reentrant=False))
    return {name: torch.cat([part[name] for part in parts]) for name in inputs}
