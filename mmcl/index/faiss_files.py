"""A FAISS index as a file: written whole or not at all, read into memory or left on the disk."""

import ctypes
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmcl.index.faiss_factory import parts, reason
from mmcl.index.faiss_setup import load_faiss

FILE = "index.faiss"
MADV_NORMAL = 0


def write_faiss(index: Any, folder: Path, name: str = FILE) -> list[str]:
    """Write the index into a folder; returns the files' names. OSError where the disk is full."""
    with open(folder / name, "wb") as file:
        serialise(index, file.write)
    return [name]


def read_faiss(folder: Path, memory_map: bool = False, name: str = FILE) -> Any:
    """Read what `write_faiss` wrote.

    Args:
        folder: that holds the file.
        memory_map: leave codes, inverted lists and graphs on the disk, to be read (and kept, while memory lasts) by
            the system as searches touch them. The index is then read-only, and lives on where the file is removed.
            What FAISS repacks is read into memory all the same: 4-bit codes for fast scans (PQ16x4fs).
    Raises: FileNotFoundError; ValueError naming a file that FAISS cannot read.
    """
    faiss, file = load_faiss(), folder / name
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing")
    flags = faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_READ_ONLY if memory_map else 0
    try:
        index = faiss.read_index(str(file), flags)
    except (RuntimeError, MemoryError) as error:
        raise ValueError(f"FAISS cannot read {file}: {reason(error)}") from None
    if memory_map and not any(isinstance(part, faiss.IndexHNSW) for part in parts(index)):
        read_ahead(file)
    return index


def read_ahead(file: Path) -> None:
    """Have Linux read a mapped file ahead: FAISS has it fetch page by page, as graphs want, and a list not yet in
    memory takes 4 times as long."""
    if sys.platform != "linux":
        return
    system = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.endswith(str(file.resolve())):
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            system.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_NORMAL)


def in_memory(index: Any) -> Any:
    """A copy that may be changed, also of a memory-mapped index (whose clones still write into the mapping, and crash).

    While it is made, memory holds the codes twice.
    """
    faiss = load_faiss()
    return faiss.deserialize_index(faiss.serialize_index(index))


def stored_bytes(index: Any) -> int:
    """How many bytes `write_faiss` writes."""
    sizes: list[int] = []

    def count(part: bytes) -> int:
        sizes.append(len(part))
        return len(part)

    serialise(index, count)
    return sum(sizes)


def serialised(index: Any) -> bytes:
    """What `write_faiss` writes."""
    content = io.BytesIO()
    serialise(index, content.write)
    return content.getvalue()


def serialise(index: Any, write: Callable[[bytes], int]) -> None:
    """Hand the index to `write`, piece by piece. FAISS's own file writer takes a full disk for success."""
    faiss = load_faiss()
    faiss.write_index(index, faiss.PyCallbackIOWriter(write))
