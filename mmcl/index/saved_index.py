"""What an index is on disk: saved, loaded, verified."""

import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from mmcl.index.building import LOCAL, MILVUS, opened_milvus
from mmcl.index.devices import check_device
from mmcl.index.fusion import Fusion
from mmcl.index.item_checks import check_model, refuse_fingerprint
from mmcl.index.local_files import read_tuples
from mmcl.index.store import FORMAT_VERSION, read_version, write_version
from mmcl.tables import lookup

BACKENDS = {"faiss": LOCAL, "exact": LOCAL, "milvus": MILVUS}
"""Where tuples of a backend are kept: in this process, or in Milvus."""


Index = TypeVar("Index", bound="SavedIndex")


class SavedIndex:
    """A fusion and its tuples, and where they lie on disk; `TupleIndex` adds what is done with them."""

    def __init__(self, fusion: Fusion, tuples: Any):
        self._fusion, self._tuples = fusion, tuples
        self.model: Any = None
        self.fingerprint: str | None = None
        self.search_parameters: dict[str, Any] = {}
        """Used where a search gives none."""
        self.reason: str | None = None
        """Why factory="auto" took this type."""
        self.mapped = False
        """Whether `load` leaves full vectors on the disk unless told otherwise: a memory budget counts on it."""
        self._path: Path | None = None
        self._folder: TemporaryDirectory | None = None
        self._versions: dict[Path, str] = {}
        """{folder: the version that was last loaded from there, or saved to it}."""
        self._saving = threading.Lock()

    def save(self, path: Any, *, replace: bool = False) -> None:
        """Write the index into a folder; an index that is there already is replaced in one step, whole or not at all.

        Args:
            path: the folder.
            replace: also what another writer has saved there since this index was loaded from it, or saved to it.
        Raises: ValueError where the folder holds something else, or another writer's version; TimeoutError where
            another process is writing there; OSError where the disk does not take it.
        """
        with self._saving:
            path = Path(path)
            known = None if replace else self._versions.get(path.resolve())
            write, about, done = self._draft()
            write_version(path, write, about, known, functools.partial(done, path))

    @classmethod
    def load(
        cls: type[Index],
        path: Any,
        model: Any = None,
        device: Any = "cpu",
        *,
        memory_map: bool | None = None,
        token: str | None = None,
    ) -> Index:
        """Read an index that `save` wrote, after checking every file's checksum.

        Args:
            path: the folder.
            model: encodes raw queries; it must be the one that the index was built with.
            device: as in `build`, whatever the index was built on.
            memory_map: leave the vectors on the disk and read them as searches need them. Default: where the index was
                built within a memory budget that it keeps only so.
            token: of Milvus, where the tuples are there.
        Raises: FileNotFoundError where there is no index; ValueError that names the damaged or foreign file, or both
            fingerprints of a model that differs.
        """
        device = check_device(device)
        index = read_version(Path(path), functools.partial(cls._read, memory_map=memory_map, token=token))
        index._path = Path(path).absolute()
        index._tuples.move(device)
        if model is not None:
            refuse_fingerprint(index.fingerprint, check_model(model).fingerprint(), f"{path} was")
            if model.score.config() != index._fusion.score.config():
                raise ValueError(
                    f"{path} has the score {index._fusion.score.config()}, the model {model.score.config()}"
                )
            index.model = model
        return index

    def verify(self) -> None:
        """Check that the parts of the index agree, and the files it was saved to or loaded from with their checksums.

        Raises: ValueError that says what is wrong, naming the file.
        """
        self._tuples.verify(self._fusion.width)
        if self._path is not None:
            read_version(self._path, lambda *_: None)

    @classmethod
    def _read(
        cls: type[Index], folder: Path, manifest: dict[str, Any], memory_map: bool | None, token: str | None
    ) -> Index:
        fusion = Fusion.read(folder, manifest)
        mapped = manifest.get("mapped", False)  # older indexes do not say
        if lookup(BACKENDS, manifest["backend"], "backend") == MILVUS:
            tuples = opened_milvus(manifest, fusion.width, token)
        else:
            tuples = read_tuples(folder, manifest, fusion.width, mapped if memory_map is None else memory_map)
        index = cls(fusion, tuples)
        index.fingerprint = manifest["fingerprint"]
        index._versions[folder.parent.resolve()] = manifest["version"]
        index.search_parameters, index.reason = manifest["search_parameters"], manifest["reason"]
        index.mapped = mapped
        return index

    def _draft(self) -> tuple[Callable[[Path], Any], dict[str, Any], Callable[[Path, Any], None]]:
        """This moment's version: what writes it, what its manifest says, what is told where it has been written."""
        saving = self._tuples.saving()

        def write(folder: Path) -> dict[str, Any]:
            self._fusion.write(folder)
            return saving.write(folder)

        def done(path: Path, manifest: Mapping[str, Any]) -> None:
            saving.done(path / manifest["version"], manifest["files"])
            self._path = path.absolute()
            self._versions[path.resolve()] = manifest["version"]

        return write, {**self._about(), **saving.about()}, done

    def _about(self) -> dict[str, Any]:
        """What manifest and `info` share, beside the tuples themselves."""
        return {
            **about_index(self._fusion, self.fingerprint),
            "search_parameters": self.search_parameters,
            "reason": self.reason,
            "mapped": self.mapped,
        }


def about_index(fusion: Fusion, fingerprint: str | None) -> dict[str, Any]:
    """What the manifest says of an index, beside its tuples."""
    about = {"format_version": FORMAT_VERSION, "metric": "inner product", "fingerprint": fingerprint}
    return {**about, **fusion.about()}
