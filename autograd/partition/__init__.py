"""Partitions: ordered, shaped sets of ranks over which tensors are cut; sums, copies and cuts between them.

A CartesianPartition gives 12 ranks the shape (2, 2, 3), say; position p of the partition has the coordinates of p in C
order. Ranks of the communicator that are not in a partition are inactive: for them, a tensor on it is one of volume
zero (`zero_volume_tensor`). Every rank of the communicator, inactive or not, makes and calls partitions and the modules
here, in the same order, and enters the backward pass (see ops/__init__.py; pass outputs that it does not use to
`anchor`).

After DistDL's layers of the same names. The convention of gradient is "sum": the true adjoint.
"""

from .cartesian import CartesianPartition, Partition
from .modules import AllSumReduce, Broadcast, Repartition, SumReduce, zero_volume_tensor

__all__ = [
    "AllSumReduce",
    "Broadcast",
    "CartesianPartition",
    "Partition",
    "Repartition",
    "SumReduce",
    "zero_volume_tensor",
]
