"""Factory strings as index types of Milvus: built as asked for, or refused with a reason."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

AUTO = "Flat"
METRIC = "IP"
EF, MAX_EF = 64, 32768
EF_CONSTRUCTION, CODE_BITS = 200, 8


class IndexType(NamedTuple):
    """A row of `TYPES`."""

    pattern: str
    name: str
    numbers: dict[str, tuple[int, int]]
    """Milvus's names of the numbers in the pattern, with the least and the most that it takes."""
    fixed: dict[str, int]
    exact: bool
    effort: str | None
    """The search parameter, as FAISS names it, that makes a search visit more; None: it sees all."""
    on_lite: bool


NLIST = {"nlist": (1, 65536)}
TYPES = (
    IndexType(r"Flat", "FLAT", {}, {}, True, None, True),
    IndexType(r"IVF(\d+),Flat", "IVF_FLAT", NLIST, {}, True, "nprobe", True),
    IndexType(r"IVF(\d+),SQ8", "IVF_SQ8", NLIST, {}, False, "nprobe", True),
    IndexType(r"HNSW(\d+)", "HNSW", {"M": (2, 2048)}, {"efConstruction": EF_CONSTRUCTION}, True, "efSearch", True),
    IndexType(r"IVF(\d+),PQ(\d+)", "IVF_PQ", NLIST | {"m": (1, 65536)}, {"nbits": CODE_BITS}, False, "nprobe", False),
)
CHOICES = "choose from 'Flat', 'IVF64,Flat', 'IVF64,SQ8', 'HNSW32' and, on a server or cluster, 'IVF64,PQ16'"


@dataclass(frozen=True)
class Plan:
    """The index that a factory string asks for.

    Args:
        factory: the string.
        type: its row of `TYPES`.
        build: {name: number} as Milvus names them.
    """

    factory: str
    type: IndexType
    build: dict[str, int]

    def check_parameters(self, given: Mapping[str, Any]) -> None:
        """ValueError for a search parameter that this type does not have, and for one that is no integer >= 1."""
        effort = self.type.effort
        for name, value in given.items():
            if name != effort:
                has = f"it has ['{effort}']" if effort else "it has none"
                raise ValueError(f"unknown search parameter {name!r} for factory {self.factory!r} in Milvus; {has}")
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")

    def search(self, given: Mapping[str, Any], k: int) -> dict[str, int]:
        """What Milvus takes, of checked parameters."""
        if self.type.effort == "efSearch":
            return {"ef": min(max(int(given.get("efSearch", EF)), k), MAX_EF)}
        return {"nprobe": min(int(given["nprobe"]), self.build["nlist"])} if "nprobe" in given else {}

    def widest(self, k: int) -> dict[str, int]:
        """`search` with the largest effort that Milvus takes."""
        most = {"efSearch": MAX_EF, "nprobe": self.build.get("nlist")}
        return self.search({name: value for name, value in most.items() if name == self.type.effort}, k)

    def index_parameters(self, lite: bool) -> dict[str, Any]:
        """Of `create_index`. Milvus Lite ignores numbers that do not also stand under "params"."""
        numbers: dict[str, Any] = {**self.build, **({"params": self.build} if lite else {})}
        return {"index_type": self.type.name, "metric_type": METRIC, "params": numbers}

    def differences(self, described: Mapping[str, Any] | None) -> list[str]:
        """In what an index that Milvus describes is not this one."""
        if not described:
            return ["there is no index on the vectors"]
        numbers = {**described, **(described.get("params") or {})}
        wanted = {"index_type": self.type.name, "metric_type": METRIC, **self.build}
        wrong = {
            name: (numbers.get(name), value) for name, value in wanted.items() if str(numbers.get(name)) != str(value)
        }
        return [f"{name} is {found!r}, not {value!r}" for name, (found, value) in wrong.items()]


def plan_of(factory: Any, width: int, lite: bool) -> Plan:
    """The plan of a factory string; ValueError that says what would have been right."""
    name = AUTO if factory == "auto" else factory
    for row in TYPES:
        match = re.fullmatch(row.pattern, name, re.ASCII) if isinstance(name, str) else None
        if match is None:
            continue
        if lite and not row.on_lite:
            raise ValueError(
                f"factory {factory!r}: Milvus Lite accepts {row.name} and then searches without it; use 'IVF64,SQ8', "
                "or a server or cluster"
            )
        build = dict(zip(row.numbers, map(int, match.groups()), strict=True))
        for number, (least, most) in row.numbers.items():
            if not least <= build[number] <= most:
                raise ValueError(f"factory {factory!r}: Milvus takes {least} to {most} for {number}")
        if width % build.get("m", 1):
            raise ValueError(f"factory {factory!r}: {build['m']} sub-quantisers do not divide the width {width}")
        return Plan(name, row, build | row.fixed)
    raise ValueError(f"Milvus cannot build factory {factory!r}; {CHOICES}")
