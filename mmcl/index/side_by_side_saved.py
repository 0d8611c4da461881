"""Several indexes that stand side by side: saved, loaded, verified."""

import functools
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from mmcl.index.devices import check_device
from mmcl.index.item_checks import check_model, refuse_fingerprint
from mmcl.index.side_by_side_changes import held, refuse_differing
from mmcl.index.side_by_side_files import folder_names, read_together, write_together
from mmcl.index.side_by_side_parts import Names
from mmcl.index.tuple_index import TupleIndex

Indexes = TypeVar("Indexes", bound="SavedIndexes")


class SavedIndexes:
    """Indexes by what they store, and where they lie on disk; `TupleIndexes` adds what is done with them."""

    def __init__(self, indexes: Mapping[Names, TupleIndex]):
        self._indexes = dict(indexes)
        self._names = folder_names(self._indexes)
        self._path: Path | None = None
        self._versions: dict[Path, str] = {}
        """{folder: the version of the whole that was last loaded from there, or saved to it}."""
        self._saving = threading.Lock()

    def save(self, path: Any, *, replace: bool = False) -> None:
        """Write all indexes into a folder, each into one of its own; what is there already is replaced in one step.

        Each can be loaded alone: `TupleIndex.load(path / "image+audio")`. Saved alone, it no longer belongs to the
        others, and they refuse to be loaded with it.

        Args, Raises: as `TupleIndex.save`.
        """
        with self._saving:
            path = Path(path).resolve()
            known = None if replace else self._versions.get(path)
            with held(self._all):  # all drafts are of one moment
                drafts = {name: index._draft() for name, index in zip(self._names, self._all, strict=True)}
            write_together(path, drafts, known, functools.partial(self._saved, path))

    @classmethod
    def load(
        cls: type[Indexes],
        path: Any,
        model: Any = None,
        device: Any = "cpu",
        *,
        memory_map: bool | None = None,
        token: str | None = None,
    ) -> Indexes:
        """Read what `save` wrote, after checking every file's checksum.

        Args: as in `TupleIndex.load`.
        Raises: as `TupleIndex.load`; ValueError naming an index that was saved without the others.
        """
        path, device = Path(path).resolve(), check_device(device)
        load = functools.partial(TupleIndex.load, device=device, memory_map=memory_map, token=token)
        found, version = read_together(path, load)
        if model is not None:
            refuse_fingerprint(found[0].fingerprint, check_model(model).fingerprint(), f"{path} was")
            if model.score.config() != found[0].score.config():
                raise ValueError(f"{path} has the score {found[0].score.config()}, the model {model.score.config()}")
            for index in found:
                index.model = model
        indexes = cls({index.modalities: index for index in found})
        refuse_differing(found)
        indexes._saved(path, version)
        return indexes

    def verify(self) -> None:
        """Check that the indexes have the same items, also on disk, and each of them as `TupleIndex.verify` does."""
        refuse_differing(self._all)
        for index in self._all:
            index.verify()
        if self._path is not None:
            read_together(self._path, lambda _: None)

    def _saved(self, path: Path, version: str) -> None:
        self._path, self._versions[path] = path, version

    @property
    def _all(self) -> list[TupleIndex]:
        return list(self._indexes.values())

    @property
    def _first(self) -> TupleIndex:
        return self._all[0]
