"""Files: checksums, and weights written as other files are."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def sha256(file: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal; read in pieces."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def save_tensors(tensors: Mapping[str, Tensor], file: str | Path, metadata: dict[str, str] | None = None) -> None:
    """Write safetensors that all may read whom the umask allows; the library alone leaves them to their owner.

    Every tensor is written under every name it has: tensors that share memory come back as equal copies.
    """
    state = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    try:
        save_file(state, file, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written: {error}") from error
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(file, 0o666 & ~umask)
