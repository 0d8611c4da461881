"""An index of tuples: one raw inner product retrieves them from any subset of the other modalities."""

from mmcl.index.hits import Hits
from mmcl.index.mining import hard_negatives, near_duplicates
from mmcl.index.side_by_side import TupleIndexes
from mmcl.index.tuple_index import TupleIndex

__all__ = ["Hits", "TupleIndex", "TupleIndexes", "hard_negatives", "near_duplicates"]
