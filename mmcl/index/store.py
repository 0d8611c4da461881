"""An index on disk: versions side by side, a manifest that names the one that counts, checksums of every file.

path/
  manifest.json         format, version, what the index is, size and SHA-256 of every file, SHA-256 of itself
  v-<unique>/           score.safetensors, and the files of the tuples (see `local_files`)
"""

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from mmcl import __version__
from mmcl.files import made_folder, sha256

FORMAT, TOGETHER = "mmcl.tuple_index", "mmcl.tuple_indexes"
FORMAT_VERSION = 2
FORMATS = {FORMAT: (FORMAT_VERSION, "an index (TupleIndex)"), TOGETHER: (1, "several indexes (TupleIndexes)")}
"""{what a manifest is of: (its version, the same in words)}."""
MANIFEST, DRAFT, LOCK = "manifest.json", ".manifest.json.draft", ".lock"
BUILDING = ".building"
"""Folder of a build that goes on where it was interrupted."""
LOCK_SECONDS = 60.0
"""How long a writer waits for another to finish."""
VERSION = re.compile(r"v-[0-9a-f]{32}")
NO_DIGEST = "0" * 64

Loaded = TypeVar("Loaded")
Digest = dict[str, Any]
"""{"size": bytes, "sha256": hexadecimal} of a file."""


def write_version(
    path: Path,
    write: Callable[[Path], dict[str, Digest]],
    about: Mapping[str, Any],
    expected: str | None = None,
    switched: Callable[[dict[str, Any]], None] = lambda manifest: None,
) -> None:
    """Write a new version beside the old one, switch to it in one step, remove the old.

    Killed at any point, the folder still loads: as the old version before the switch, as the new one after.

    Args:
        path: of the index; made where missing, refused where it holds anything else.
        write: writes all files of the version into the folder it is given; returns the sizes and checksums that it
            knows beforehand, of files that it linked from the version before.
        about: what the manifest says besides versions and checksums, JSON-serialisable.
        expected: the version that the writer knows; None: whatever is there is replaced.
        switched: told the manifest once it counts, whatever fails afterwards.
    Raises: ValueError where the folder holds something else, or another version than expected; TimeoutError where
        another writer holds the lock for a minute; OSError where the disk does not take it.
    """
    made_folder(path, "an index is saved")
    refuse_foreign_folder(path)
    with locked(path):
        refuse_changed(path, expected)
        manifest = add_version(path, write, about)
        try:
            write_manifest(path, manifest)
        except BaseException:
            if is_current(path, manifest["version"]):
                switched(manifest)
            else:
                shutil.rmtree(path / manifest["version"], ignore_errors=True)
            raise
        switched(manifest)
        remove_other_versions(path, manifest["version"])


def add_version(path: Path, write: Callable[[Path], dict[str, Digest]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Write a version beside the one that counts, whole on the disk; returns the manifest that would make it count."""
    folder = path / f"v-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
        known = write(folder)
        head = {"format": FORMAT, "format_version": FORMAT_VERSION, "mmcl_version": __version__}
        files = {file.name: known.get(file.name) or digest_of(file) for file in sorted(folder.iterdir())}
        sync(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return {**head, "version": folder.name, **about, "files": files}


def remove_other_versions(path: Path, version: str) -> None:
    """Leave only this version, which counts already."""
    sync(path)
    for old in path.iterdir():
        if VERSION.fullmatch(old.name) and old.name != version:
            shutil.rmtree(old, ignore_errors=True)  # the new one counts; the next save tries again


def read_version(path: Path, read: Callable[[Path, dict[str, Any]], Loaded]) -> Loaded:
    """`read(folder, manifest)` of the current version, after its checksums; again if a writer switched meanwhile."""

    def checked(manifest: dict[str, Any]) -> Loaded:
        folder = path / manifest["version"]
        check_files(folder, manifest["files"])
        return read(folder, manifest)

    return read_current(path, checked)


def read_current(path: Path, read: Callable[[dict[str, Any]], Loaded], form: str = FORMAT) -> Loaded:
    """`read(manifest)` of what counts now; again if a writer switched meanwhile."""
    while True:
        manifest = read_manifest(path, form)
        try:
            return read(manifest)
        except (OSError, ValueError):
            if read_manifest(path, form)["version"] == manifest["version"]:
                raise


def read_manifest(path: Path, form: str = FORMAT) -> dict[str, Any]:
    """The manifest of the index, or of what else `form` names, at `path`.

    Raises: FileNotFoundError where there is no index; ValueError naming the file where it is broken, of something
        else, or of another format version.
    """
    (version, what), file = FORMATS[form], path / MANIFEST
    if not file.is_file():
        raise FileNotFoundError(f"no index at {path}: it has no {MANIFEST}")
    content = file.read_bytes()
    try:
        manifest = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    found = str(manifest.get("format")) if isinstance(manifest, dict) else ""
    if found != form:
        other = f", but of {FORMATS[found][1]}" if found in FORMATS else ""
        raise ValueError(f"{file} is not the manifest of {what}{other}")
    if manifest.get("format_version") != version:
        found = manifest.get("format_version")
        raise ValueError(f"{file} has format version {found!r}; this mmcl ({__version__}) reads {version}")
    digest = str(manifest.get("sha256"))
    if content_digest(content.replace(digest.encode(), NO_DIGEST.encode())) != digest:
        raise ValueError(f"{file} is damaged: its SHA-256 differs from the one it states")
    return manifest


def check_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """ValueError that names the first file which is missing, of another size, or of other content."""
    for name, stated in files.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{file} is missing")
        size = file.stat().st_size
        if size != stated["size"]:
            raise ValueError(f"{file} is damaged: it has {size} bytes, the manifest says {stated['size']}")
        if sha256(file) != stated["sha256"]:
            raise ValueError(f"{file} is damaged: its SHA-256 differs from the manifest's")


def refuse_foreign_folder(path: Path) -> None:
    """ValueError where the folder holds neither an index nor only what a killed first save left."""
    ours = (DRAFT, LOCK, BUILDING, MANIFEST)
    foreign = sorted(e.name for e in path.iterdir() if e.name not in ours and not VERSION.fullmatch(e.name))
    if (path / MANIFEST).exists():
        read_manifest(path)
        return
    if foreign:
        raise ValueError(f"{path} holds something else than an index ({foreign[0]!r}); choose another folder")


def refuse_changed(path: Path, expected: str | None, form: str = FORMAT) -> None:
    """ValueError where another writer has saved since: what it stored would be lost."""
    if expected is None or not (path / MANIFEST).exists():
        return
    found = read_manifest(path, form)["version"]
    if found != expected:
        raise ValueError(
            f"{path} has been saved by another writer since this index was loaded or saved ({found} is there, not "
            f"{expected}); load it again, or save with replace=True"
        )


def is_current(path: Path, version: str, form: str = FORMAT) -> bool:
    """Whether the manifest already names this version: an interrupt may come right after the switch."""
    try:
        return read_manifest(path, form)["version"] == version
    except (OSError, ValueError):
        return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Two writers take turns: each would take the other's unfinished version for a leftover."""
    from filelock import FileLock, Timeout

    lock = FileLock(str(path / LOCK), timeout=LOCK_SECONDS)
    try:
        lock.acquire()
    except Timeout:
        told = f"another process has been writing to {path} for {LOCK_SECONDS:g} s (it holds {path / LOCK}); try later"
        raise TimeoutError(told) from None
    try:
        yield
    finally:
        lock.release()


def digest_of(file: Path) -> Digest:
    """Size and SHA-256 of a file that is now on the disk itself."""
    sync(file)
    return {"size": file.stat().st_size, "sha256": sha256(file)}


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Switch to a version: the manifest is replaced in one step. It states the SHA-256 of itself with zeros there."""
    text = json.dumps({**manifest, "sha256": NO_DIGEST}, indent=2)
    text = text.replace(NO_DIGEST, content_digest(text.encode()))
    (path / DRAFT).write_bytes(text.encode())
    sync(path / DRAFT)
    os.replace(path / DRAFT, path / MANIFEST)
    return dict(manifest)


def sync(path: Path) -> None:
    """Have the file or folder on the disk, not only in the system's memory."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def content_digest(content: bytes) -> str:
    """Hex digest of bytes."""
    return hashlib.sha256(content).hexdigest()
