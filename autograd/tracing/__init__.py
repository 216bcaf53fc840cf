"""What all ranks compute and communicate, as one trace."""

from .tracing import Tracing, trace

__all__ = ["Tracing", "trace"]
