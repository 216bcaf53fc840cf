"""The C library: nccl.h in Python, its structs, loading, errors."""
