"""Tests for distributed functions: check_adjoint for linear functions, check_gradients for any function, check_model
for a sharded model compared with the unsharded one."""

from pynccl.bindings.listing import public_dir

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

__dir__ = public_dir(globals())
