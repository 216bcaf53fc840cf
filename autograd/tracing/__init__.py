"""Record the computation and communication of all ranks in one trace."""

from .tracing import Tracing, trace

__all__ = ["Tracing", "trace"]
