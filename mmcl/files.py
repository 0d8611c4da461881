"""Files and folders: checksums, weights written as other files are, folders that are none."""

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


def refuse_file(folder: Path, what: str) -> None:
    """ValueError where there cannot be such a folder, since it, or one above it, is a file.

    Args:
        what: who asks for one, such as "an index is saved".
    """
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if there is not None and not there.is_dir():
        raise ValueError(f"{there} is a file; {what} as a folder")


def made_folder(folder: str | Path, what: str) -> Path:
    """The folder, with those above it; ValueError as `refuse_file`."""
    refuse_file(Path(folder), what)
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)
