"""Matmuls with the collective before or behind them, as one operation each, which hides the one behind the other."""

from .all_gather_matmul import all_gather_matmul
from .comm_overlap import CommOverlap, CommOverlapHelper, CommOverlapP2P
from .config import OverlapConfig
from .copy_matmul import copy_matmul
from .matmul_all_reduce import Slices, matmul_all_reduce
from .matmul_reduce_scatter import matmul_reduce_scatter

__all__ = [
    "CommOverlap",
    "CommOverlapHelper",
    "CommOverlapP2P",
    "OverlapConfig",
    "Slices",
    "all_gather_matmul",
    "copy_matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]
