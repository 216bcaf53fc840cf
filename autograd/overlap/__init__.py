"""Linear layers fused with the collective before or after them: computation and communication overlap."""

from pynccl.bindings.listing import public_dir

from .choose import decisions, retry
from .config import OverlapConfig
from .functions import all_gather_matmul, copy_matmul, matmul_all_reduce, matmul_reduce_scatter
from .handoff import Slices
from .report import Report, Trace, recording, report
from .saved import load, save
from .schedules import Decision
from .te import CommOverlap, CommOverlapHelper, CommOverlapP2P

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
    "copy_matmul",
    "decisions",
    "load",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "recording",
    "report",
    "retry",
    "save",
]

__dir__ = public_dir(globals())
