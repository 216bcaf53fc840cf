"""Tests of distributed functions, for yours too: check_adjoint for linear ones, check_gradients for all, check_model
for a sharded model beside the unsharded one."""

from .adjoint import TOLERANCE, AdjointError, check_adjoint
from .check_model import check_model
from .gradients import GradientError, check_gradients
from .model_gradients import Difference, ModelError, ModelReport

__all__ = [
    "TOLERANCE",
    "AdjointError",
    "Difference",
    "GradientError",
    "ModelError",
    "ModelReport",
    "check_adjoint",
    "check_gradients",
    "check_model",
]
