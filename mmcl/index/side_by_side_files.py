"""Several indexes on disk: each in a folder of its own, as `TupleIndex.save` writes it, all replaced in one step.

path/
  manifest.json     which indexes belong together, and the manifest of each one's version; SHA-256 of itself
  image+audio/      an index like any other, see `store`
  text/
"""

import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mmcl import __version__
from mmcl.files import refuse_file
from mmcl.index.store import (
    BUILDING,
    DRAFT,
    FORMATS,
    LOCK,
    MANIFEST,
    TOGETHER,
    add_version,
    is_current,
    locked,
    read_current,
    read_manifest,
    refuse_changed,
    refuse_foreign_folder,
    remove_other_versions,
    write_manifest,
)

UNSAFE, CAPITALS = re.compile(r"[^A-Za-z0-9_-]"), re.compile(r"[^a-z0-9_-]")
"""In names of files: what some system refuses, or takes for another character."""
FOLDER = re.compile(r"[A-Za-z0-9_+%-]+")

Draft = tuple[Callable[[Path], Any], Mapping[str, Any], Callable[[Path, Any], None]]
"""See `TupleIndex._draft`."""


def folder_names(stored: Iterable[tuple[str, ...]]) -> list[str]:
    """A folder for each index: its modalities joined by "+", each byte of other characters than these as %XX.

    Where two would differ only in case, capitals are written so too: some file systems would take them for one.
    """
    stored = list(stored)
    for unsafe in (UNSAFE, CAPITALS):
        names = ["+".join(unsafe.sub(percent, name) for name in modalities) for modalities in stored]
        if len({name.lower() for name in names}) == len(names):
            break
    return names


def percent(found: re.Match[str]) -> str:
    """A character as its UTF-8 bytes, %XX each."""
    return "".join(f"%{byte:02X}" for byte in found[0].encode())


def write_together(
    path: Path, drafts: Mapping[str, Draft], expected: str | None, switched: Callable[[str], None]
) -> None:
    """Write a new version of every index, then switch to all of them in one step.

    Killed at any point, the folder still loads: as the old versions before the switch, as the new ones after.

    Args:
        path: made where missing, refused where it holds anything else.
        drafts: {folder: what is written there}; each is told its manifest once the whole counts.
        expected: the version of the whole that the writer knows; None: whatever is there is replaced.
        switched: told the version of the whole once it counts, whatever fails afterwards.
    Raises: as `write_version`.
    """
    refuse_foreign(path, drafts)
    path.mkdir(parents=True, exist_ok=True)
    with ExitStack() as locks:
        for each in (path, *(path / folder for folder in drafts)):
            each.mkdir(exist_ok=True)
            locks.enter_context(locked(each))
        refuse_changed(path, expected, TOGETHER)
        before = folders_there(path)
        for folder, manifest in add_versions(path, drafts, switched).items():
            switch(path / folder, manifest)
        for folder in before - set(drafts):
            shutil.rmtree(path / folder)


def add_versions(path: Path, drafts: Mapping[str, Draft], switched: Callable[[str], None]) -> dict[str, Any]:
    """Write a version of every index, and then the manifest that makes them count; returns {folder: its manifest}."""
    manifests: dict[str, Any] = {}
    head = {"format": TOGETHER, "format_version": FORMATS[TOGETHER][0], "mmcl_version": __version__}
    version = f"v-{uuid.uuid4().hex}"

    def tell() -> None:
        switched(version)
        for folder, manifest in manifests.items():
            drafts[folder][2](path / folder, manifest)

    try:
        for folder, (write, about, _) in drafts.items():
            manifests[folder] = add_version(path / folder, write, about)
        write_manifest(path, {**head, "version": version, "indexes": manifests})
        tell()
    except BaseException:
        if is_current(path, version, TOGETHER):
            tell()
        else:
            for folder, manifest in manifests.items():
                shutil.rmtree(path / folder / manifest["version"], ignore_errors=True)
        raise
    return manifests


def switch(path: Path, manifest: Mapping[str, Any]) -> None:
    """Have the index at `path` be of this version for those, too, who load it alone."""
    write_manifest(path, manifest)
    remove_other_versions(path, manifest["version"])


def read_together(path: Path, read: Callable[[Path], Any]) -> tuple[list[Any], str]:
    """`read(folder)` of every index, and the version of the whole.

    Raises: FileNotFoundError where there are none; ValueError naming an index that has been saved on its own since.
    """

    def read_all(whole: Mapping[str, Any]) -> tuple[list[Any], str]:
        found = []
        for folder, manifest in folders_of(path, whole).items():
            settle(path, folder, whole)
            found.append(read(path / folder))
            refuse_alone(path / folder, manifest)
        return found, whole["version"]

    return read_current(path, read_all, TOGETHER)


def settle(path: Path, folder: str, whole: Mapping[str, Any]) -> None:
    """Finish what a writer that was killed after the switch left undone in one of the folders."""
    manifest = whole["indexes"][folder]
    unfinished = path / folder / manifest["version"]
    if stated_version(path / folder) == manifest["version"] or not unfinished.is_dir():
        return
    with locked(path / folder):  # a writer that is still at it finishes first, and none begins
        if is_current(path, whole["version"], TOGETHER) and unfinished.is_dir():
            switch(path / folder, manifest)


def stated_version(path: Path) -> str | None:
    """The version that the manifest of the index at `path` names; None where there is none yet."""
    return read_manifest(path)["version"] if (path / MANIFEST).is_file() else None


def refuse_alone(path: Path, manifest: Mapping[str, Any]) -> None:
    """ValueError where the index at `path` is no longer of the version that belongs to the others'."""
    found = stated_version(path)
    if found != manifest["version"]:
        raise ValueError(
            f"{path} has been saved on its own since it was saved with the others ({found} is there, not "
            f"{manifest['version']}): load each with TupleIndex.load, or build them again"
        )


def refuse_foreign(path: Path, folders: Iterable[str]) -> None:
    """ValueError where `path` is a file, or holds something that a save of these folders would spoil."""
    refuse_file(path, "indexes are saved")
    if not path.is_dir():
        return
    entries = [(entry, (entry / MANIFEST).exists()) for entry in sorted(path.iterdir())]
    before = folders_there(path)  # read last: another writer may have finished its first save meanwhile
    for entry, counts in entries:
        if entry.name in (DRAFT, LOCK, MANIFEST, BUILDING) or entry.name in before:
            continue
        if entry.name not in folders or not entry.is_dir() or counts:
            raise ValueError(f"{path} holds something else than these indexes ({entry.name!r}); choose another folder")
        refuse_foreign_folder(entry)


def folders_there(path: Path) -> set[str]:
    """The folders of the indexes that were saved here; none where there was no save."""
    return set(folders_of(path, read_manifest(path, TOGETHER))) if (path / MANIFEST).exists() else set()


def folders_of(path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """{folder: manifest of its index}; ValueError for what is no name of a folder in `path`."""
    for folder in manifest["indexes"]:
        if not FOLDER.fullmatch(folder):
            raise ValueError(f"{path / MANIFEST} names the folder {folder!r}, which no save wrote")
    return dict(manifest["indexes"])
