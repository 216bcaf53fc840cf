"""Tests of distributed functions, for yours too: check_adjoint for linear ones, check_gradients for all, check_model
for a sharded model beside the unsharded one; and of the order of overlapped layers: Schedule and races,
deferred_lanes, poisoned_workspaces."""

from .adjoint import TOLERANCE, AdjointError, check_adjoint
from .check_model import check_model
from .deferred import deferred_lanes, poisoned_workspaces
from .gradients import GradientError, check_gradients
from .model_report import Difference, ModelError, ModelReport
from .schedule import Log, Schedule, races, redundant_waits

__all__ = [
    "TOLERANCE",
    "AdjointError",
    "Difference",
    "GradientError",
    "Log",
    "ModelError",
    "ModelReport",
    "Schedule",
    "check_adjoint",
    "check_gradients",
    "check_model",
    "deferred_lanes",
    "poisoned_workspaces",
    "races",
    "redundant_waits",
]
