"""Tests of distributed functions, for yours too: check_adjoint for linear ones, check_gradients for all; and of the
order of overlapped layers: Schedule and races, deferred_lanes, poisoned_workspaces."""

from .adjoint import TOLERANCE, AdjointError, check_adjoint
from .deferred import deferred_lanes, poisoned_workspaces
from .gradients import GradientError, check_gradients
from .schedule import Log, Schedule, races, redundant_waits

__all__ = [
    "TOLERANCE",
    "AdjointError",
    "GradientError",
    "Log",
    "Schedule",
    "check_adjoint",
    "check_gradients",
    "deferred_lanes",
    "poisoned_workspaces",
    "races",
    "redundant_waits",
]
