"""Automatic ids in Milvus, no two alike though several processes add at once.

Milvus has no counter, and no insert that fails on a known id: of two writers that read the same next id, one would
replace the other's items. So whoever takes ids first writes down which, in a property of the collection that is its
own, and then reads what the others wrote down. Of two that meet, the one that reads last sees the other's claim, gives
way, and claims anew behind it; where both see one another, both do. Ids between are never used then.

Ids that the caller gives are written down likewise, so that automatic ones go on behind them.

It relies on Milvus changing one property without the others, and describing a collection as it is after the latest
change. A server of Milvus Lite does so with `--max-workers 1` only: of two that change properties at once, one's change
is lost otherwise. Tested with such a server, not with a cluster.
"""

import random
import time
from collections.abc import Mapping
from typing import NamedTuple

from mmcl.index.milvus_about import PROPERTY, About, claims_of, place, properties_of, said
from mmcl.index.milvus_client import Connection

CLAIM = "mmcl.ids."
"""What names of such properties begin with; the writer's own name and a number of the time follow."""
FORGET_AFTER_S = 24 * 3600
"""A claim stays while its writer may write it again: after half of this time it takes another name."""
LONGEST_WAIT_S = 0.5
END = 2**63
"""Ids are below."""


class Claim(NamedTuple):
    """What a writer's property says."""

    end: int
    """Ids up to here may be its."""
    at: float
    """Seconds since 1970 when it was made."""

    @classmethod
    def from_text(cls, text: str) -> "Claim":
        """Of a property; ValueError for what is none."""
        end, at = text.split()
        if not 0 <= int(end) <= END:
            raise ValueError(f"ids end between 0 and 2^63, not at {end}")
        return cls(int(end), float(at))


def claim(connection: Connection, collection: str, writer: str, count: int) -> int:
    """First of `count` consecutive ids that nobody had before, or is given besides this writer.

    Args:
        writer: a name that no other has.
        count: of ids.
    Raises: ValueError where they would go beyond 2^63 - 1.
    """
    wait = LONGEST_WAIT_S / 64
    while True:
        next_id, claims = claimed(connection, collection)
        start = highest(next_id, claims)
        if start + count > END:
            raise ValueError(f"the ids from {start} on go beyond 2^63 - 1; give them as ids=[...]")
        name = write_down(connection, collection, writer, start + count)
        next_id, claims = claimed(connection, collection)
        forget(connection, collection, next_id, claims)
        kept = claims.pop(name, None)
        if kept and kept.end == start + count and highest(next_id, claims) <= start:
            return start
        time.sleep(random.uniform(0, wait))  # those who wait equally long meet again
        wait = min(2 * wait, LONGEST_WAIT_S)


def begin_above(connection: Connection, collection: str, writer: str, end: int) -> int:
    """Have automatic ids begin at `end` or above, and return where they do: the ids below may be there."""
    while (known := highest(*claimed(connection, collection))) < end:
        write_down(connection, collection, writer, end)
    return known


def write_down(connection: Connection, collection: str, writer: str, end: int) -> str:
    """Claim all ids below `end`, which is above all of them; returns the name of the property."""
    now = time.time()
    name = f"{CLAIM}{writer}.{now // (FORGET_AFTER_S / 2):.0f}"
    properties = {name: f"{end} {now:.0f}"}
    connection.call("alter_collection_properties", collection_name=collection, properties=properties)
    return name


def claimed(connection: Connection, collection: str) -> tuple[int, dict[str, Claim]]:
    """The next id that the collection itself tells, and all claims by the names of their properties."""
    properties, where = properties_of(connection, collection), place(connection, collection)
    claims = claims_of(properties, CLAIM, Claim.from_text, where)
    return said(properties, PROPERTY, About.from_text, where).next_id, claims


def highest(next_id: int, claims: Mapping[str, Claim]) -> int:
    """The least id above all of them."""
    return max([next_id, *(each.end for each in claims.values())])


def forget(connection: Connection, collection: str, next_id: int, claims: Mapping[str, Claim]) -> None:
    """Drop old claims but the highest: it says the same, and their writers may be gone."""
    last = max(claims, key=lambda name: claims[name].end, default=None)
    known, before = highest(next_id, claims), time.time() - FORGET_AFTER_S
    old = [name for name, each in claims.items() if each.at < before and (name != last or next_id == known)]
    if old:
        connection.call("drop_collection_properties", collection_name=collection, property_keys=old)
