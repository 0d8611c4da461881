"""Automatic ids in Milvus, no two alike though several processes add at once.

Milvus has no counter, and no insert that fails on a known id: of two writers that read the same next id, one would
replace the other's items. So whoever takes ids first writes down which, in a property of the collection that is its
own, and then reads what the others wrote down. Of two that meet, the one that reads last sees the other's claim, gives
way, and claims anew behind it; where both see one another, both do. Ids between are never used then.

It relies on Milvus changing one property without the others, and describing a collection as it is after the latest
change. A server of Milvus Lite does so with `--max-workers 1` only: of two that change properties at once, one's change
is lost otherwise. Tested with such a server, not with a cluster.
"""

import random
import time
from collections.abc import Mapping
from typing import NamedTuple

from mmcl.index.milvus_client import Connection
from mmcl.index.milvus_collection import about_of, properties_of

CLAIM = "mmcl.ids."
"""What names of such properties begin with; a writer's own name follows."""
FORGET_AFTER_S = 24 * 3600
"""A claim stays while another may be about to write down a next id that it had read before."""
LONGEST_WAIT_S = 0.5
END = 2**63
"""Ids are below."""


class Claim(NamedTuple):
    """What a writer's property says."""

    end: int
    """Ids up to here may be its."""
    at: float
    """Seconds since 1970 when it was made."""


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
        own = Claim(start + count, time.time())
        properties = {CLAIM + writer: f"{own.end} {own.at:.0f}"}
        connection.call("alter_collection_properties", collection_name=collection, properties=properties)
        next_id, claims = claimed(connection, collection)
        forget(connection, collection, next_id, claims)
        kept = claims.pop(CLAIM + writer, None)
        if kept and kept.end == own.end and highest(next_id, claims) <= start:
            return start
        time.sleep(random.uniform(0, wait))  # those who wait equally long meet again
        wait = min(2 * wait, LONGEST_WAIT_S)


def claimed(connection: Connection, collection: str) -> tuple[int, dict[str, Claim]]:
    """The next id that the collection itself tells, and all claims by the names of their properties."""
    properties = properties_of(connection, collection)
    parts = {name: text.split() for name, text in properties.items() if name.startswith(CLAIM)}
    claims = {name: Claim(int(end), float(at)) for name, (end, at) in parts.items()}
    return about_of(properties, connection, collection).next_id, claims


def highest(next_id: int, claims: Mapping[str, Claim]) -> int:
    """The least id above all of them."""
    return max([next_id, *(each.end for each in claims.values())])


def forget(connection: Connection, collection: str, next_id: int, claims: Mapping[str, Claim]) -> None:
    """Drop old claims below the next id: it says the same, and their writers may be gone."""
    old = [name for name, each in claims.items() if each.end <= next_id and each.at < time.time() - FORGET_AFTER_S]
    if old:
        connection.call("drop_collection_properties", collection_name=collection, property_keys=old)
