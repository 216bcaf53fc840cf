"""Matmuls with the collective before or behind them, as one operation each, which hides the one behind the other."""

from .ag_matmul import all_gather_matmul
from .calibration import calibrate
from .comm_overlap import CommOverlap, CommOverlapHelper, CommOverlapP2P
from .config import OverlapConfig
from .matmul_ar import Slices, matmul_all_reduce
from .matmul_rs import matmul_reduce_scatter
from .planner import Decision, plan
from .replicated_matmul import copy_matmul
from .reporting import Report, report
from .trace import Trace, recording

__all__ = [
    "CommOverlap",
    "CommOverlapHelper",
    "CommOverlapP2P",
    "Decision",
    "OverlapConfig",
    "Report",
    "Slices",
    "Trace",
    "all_gather_matmul",
    "calibrate",
    "copy_matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "plan",
    "recording",
    "report",
]
