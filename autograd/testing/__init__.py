"""Tests of distributed functions, for yours too: check_adjoint for linear ones, check_gradients for all."""

from .adjoint import TOLERANCE, AdjointError, check_adjoint
from .gradients import GradientError, check_gradients

__all__ = ["TOLERANCE", "AdjointError", "GradientError", "check_adjoint", "check_gradients"]
