"""FAISS search parameters by name, as a tree that follows the nesting of the index."""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from mmcl.index.faiss_factory import own_class
from mmcl.index.faiss_setup import load_faiss

QUANTIZER = "quantizer_"
"""Before the name of a parameter of an IVF's coarse quantiser, as in FAISS's ParameterSpace."""


def known_parameters(index: Any) -> dict[str, Any]:
    """{name: value that a search uses where none is given} of this index."""
    faiss = load_faiss()
    index = own_class(index)
    if isinstance(index, faiss.IndexPreTransform):
        return known_parameters(index.index)
    if isinstance(index, faiss.IndexRefine):
        return {"k_factor": index.k_factor, **known_parameters(index.base_index)}
    if isinstance(index, faiss.IndexIVF):
        inner = {QUANTIZER + name: value for name, value in known_parameters(index.quantizer).items()}
        return {"nprobe": index.nprobe, "max_codes": index.max_codes, **inner}
    if isinstance(index, faiss.IndexHNSW):
        return {"efSearch": index.hnsw.efSearch}
    return {}


def check_parameters(index: Any, factory: str, given: Mapping[str, Any]) -> None:
    """ValueError for a parameter that this index does not have, listing its own, and for one that is no number >= 1."""
    known = known_parameters(index)
    for name, value in given.items():
        if name not in known:
            has = f"it has {sorted(known)}" if known else "it has none"
            raise ValueError(f"unknown search parameter {name!r} for factory {factory!r}; {has}")
        real = isinstance(known[name], float)
        if isinstance(value, bool) or not isinstance(value, Real if real else Integral) or not at_least_one(value):
            raise ValueError(f"{name} must be {'a number' if real else 'an integer'} >= 1, got {value!r}")


def search_parameters(index: Any, given: Mapping[str, Any], k: int, chosen: Any = None) -> Any:
    """The FAISS object that carries `given` (checked) and a selector, or None where there is neither.

    Values beyond what can matter are capped.
    """
    faiss = load_faiss()
    index = own_class(index)
    if not given and chosen is None:
        return None
    if isinstance(index, faiss.IndexPreTransform):
        return faiss.SearchParametersPreTransform(index_params=search_parameters(index.index, given, k, chosen))
    if isinstance(index, faiss.IndexRefine):
        factor = float(given.get("k_factor", index.k_factor))
        inner = {name: value for name, value in given.items() if name != "k_factor"}
        factor = max(1.0, min(factor, (index.ntotal + 0.5) / k))  # FAISS cuts k * factor, a float32, to a whole number
        base = search_parameters(index.base_index, inner, max(k, int(k * factor)), chosen)
        return faiss.IndexRefineSearchParameters(k_factor=factor, base_index_params=base)
    if isinstance(index, faiss.IndexIVF):
        nprobe = min(int(given.get("nprobe", index.nprobe)), index.nlist)
        inner = {name.removeprefix(QUANTIZER): value for name, value in given.items() if name.startswith(QUANTIZER)}
        codes = min(int(given.get("max_codes", index.max_codes)), index.ntotal)
        quantizer = search_parameters(index.quantizer, inner, nprobe)
        return faiss.SearchParametersIVF(nprobe=nprobe, max_codes=codes, quantizer_params=quantizer, sel=chosen)
    if isinstance(index, faiss.IndexHNSW):
        effort = min(int(given.get("efSearch", index.hnsw.efSearch)), max(index.ntotal, 1))
        return faiss.SearchParametersHNSW(efSearch=effort, sel=chosen)
    return faiss.SearchParameters(sel=chosen)


def filling_parameter(index: Any) -> tuple[str, int, int] | None:
    """(name, value where none is given, largest that can matter) of what makes a search visit more; None: sees all."""
    faiss = load_faiss()
    index = own_class(index)
    if isinstance(index, faiss.IndexPreTransform):
        return filling_parameter(index.index)
    if isinstance(index, faiss.IndexRefine):
        return filling_parameter(index.base_index)
    if isinstance(index, faiss.IndexIVF):
        return "nprobe", index.nprobe, index.nlist
    if isinstance(index, faiss.IndexHNSW):
        return "efSearch", index.hnsw.efSearch, index.ntotal
    return None


def at_least_one(value: Any) -> bool:
    """Whether it is a finite number >= 1."""
    return value >= 1 and value != math.inf
