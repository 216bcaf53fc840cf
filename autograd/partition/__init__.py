"""Partitions: ordered, shaped sets of ranks over which tensors are split, and sums, copies and repartitions of tensors.

A CartesianPartition arranges ranks as a grid, for example 12 ranks with the shape (2, 2, 3). Positions are numbered in
C order. Ranks of the communicator that are not in a partition are inactive: on these, a tensor of the partition has no
elements (`zero_volume_tensor`). Every rank of the communicator, also an inactive one, must make and call partitions and
these modules in the same order, and run the backward pass (see ops/__init__.py; pass unused outputs to `anchor`).

The modules follow DistDL's layers of the same names. Their backward passes are the adjoints (grad="sum").
"""

from pynccl.bindings.listing import public_dir

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

__dir__ = public_dir(globals())
