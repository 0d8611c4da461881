"""Checksums of files."""

import hashlib
from pathlib import Path


def sha256(file: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal; read in pieces."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
