"""The collection that holds an index in Milvus: made as asked for, and recognised when it is opened again."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmcl.index.milvus_about import PROPERTY, About, kinds_of, place, read_about
from mmcl.index.milvus_client import Connection
from mmcl.index.milvus_factory import Plan
from mmcl.index.milvus_values import filterable, incomparable

ID, VECTOR, METADATA = "id", "vector", "metadata"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
MAX_ID_BYTES = 65535


class Saving:
    """A saved index says where its tuples are; Milvus keeps them, and no file of theirs is written."""

    def __init__(self, tuples: Any):
        self.tuples = tuples

    def about(self) -> dict[str, Any]:
        return {"backend": "milvus", **self.tuples.info()}

    def write(self, folder: Path) -> dict[str, Any]:
        return {}

    def done(self, folder: Path, files: Mapping[str, Any]) -> None:
        pass


def check_name(collection: Any) -> None:
    """ValueError for a collection name that Milvus does not take."""
    if not isinstance(collection, str) or not NAME.fullmatch(collection):
        raise ValueError(
            f"a collection is named by up to 255 letters, digits and _, no digit first, got {collection!r}"
        )


def make_room(connection: Connection, collection: str, replace: bool) -> None:
    """Drop a collection of this name. ValueError where it must stay: it is not ours, or `replace` was not asked for."""
    if not connection.call("has_collection", collection_name=collection):
        return
    if not replace:
        raise ValueError(f"there is a {place(connection, collection)} already; open it, or give replace=True")
    read_about(connection, collection)
    connection.call("drop_collection", collection_name=collection)


def create_collection(
    connection: Connection, collection: str, width: int, named: bool, plan: Plan, about: About
) -> None:
    """Make it; dropped again, with a ValueError, where its index is not the one that was asked for."""
    from pymilvus import DataType

    schema = connection.new_schema()
    if named:
        schema.add_field(ID, DataType.VARCHAR, is_primary=True, max_length=MAX_ID_BYTES)
    else:
        schema.add_field(ID, DataType.INT64, is_primary=True)
    schema.add_field(VECTOR, DataType.FLOAT_VECTOR, dim=width)
    schema.add_field(METADATA, DataType.JSON)
    connection.call(
        "create_collection",
        collection_name=collection,
        schema=schema,
        properties={PROPERTY: about.to_text()},
        consistency_level="Strong",
    )
    create_index(connection, collection, plan)
    wrong = plan.differences(described_index(connection, collection))
    if wrong:
        connection.call("drop_collection", collection_name=collection)
        raise ValueError(f"Milvus did not build factory {plan.factory!r}: {'; '.join(wrong)}")
    connection.call("load_collection", collection_name=collection)


def create_index(connection: Connection, collection: str, plan: Plan) -> None:
    """Have vectors indexed as planned."""
    parameters = plan.index_parameters(connection.is_lite)
    index = connection.new_index(field_name=VECTOR, index_name=VECTOR, **parameters)
    connection.call("create_index", collection_name=collection, index_params=index, sync=False)


def check_collection(connection: Connection, collection: str, width: int, plan: Plan) -> bool:
    """Whether its ids are str. ValueError that says in what its schema, width or index differ."""
    described = connection.call("describe_collection", collection_name=collection)
    wrong = schema_differences(described, width) + plan.differences(described_index(connection, collection))
    if wrong:
        raise ValueError(f"{place(connection, collection)} is not what it should be: {'; '.join(wrong)}")
    return is_named(described)


def load_collection(connection: Connection, collection: str, plan: Plan) -> None:
    """Make it ready for searches."""
    try:
        connection.call("load_collection", collection_name=collection)
    except RuntimeError:
        if not connection.is_lite:
            raise
        # killed while it wrote an index file, Milvus Lite stumbles over it ever after: built anew from the vectors
        connection.call("drop_index", collection_name=collection, index_name=VECTOR)
        create_index(connection, collection, plan)
        connection.call("load_collection", collection_name=collection)


def described_index(connection: Connection, collection: str) -> Any:
    """What Milvus says of the index on the vectors; None without one."""
    return connection.call("describe_index", collection_name=collection, index_name=VECTOR)


def filter_expression(where: Any, about: About) -> str:
    """A filter in Milvus's language. ValueError that names a column whose values Milvus cannot compare."""
    from mmcl.index.filters import check_where, columns_of
    from mmcl.index.milvus_filters import to_milvus

    unfit = incomparable(about.columns, about.not_finite)
    try:
        return to_milvus(where, filterable(about.columns, about.not_finite), id_name=ID)
    except ValueError as error:
        for name in columns_of(check_where(where)[0], [*about.columns.names, ID]):
            if name in unfit:
                raise ValueError(f"filter {where!r}: Milvus cannot compare column {name!r}: {unfit[name]}") from error
        raise


def is_named(described: Mapping[str, Any]) -> bool:
    """Whether ids are str."""
    return kinds_of(described).get(ID) == "VARCHAR"


def schema_differences(described: Mapping[str, Any], width: int) -> list[str]:
    """In what a collection that Milvus describes is not one of ours of this width."""
    wanted = {ID: "VARCHAR" if is_named(described) else "INT64", VECTOR: "FLOAT_VECTOR", METADATA: "JSON"}
    if kinds_of(described) != wanted:
        return [f"its fields are {kinds_of(described)}, not {wanted}"]
    fields = {field["name"]: field for field in described["fields"]}
    found = int(fields[VECTOR]["params"]["dim"])
    wrong = [] if found == width else [f"its vectors have width {found}, not {width}"]
    return wrong if fields[ID].get("is_primary") else [*wrong, f"its primary key is not {ID!r}"]
