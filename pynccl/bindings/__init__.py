"""The C library: nccl.h in Python, its structs, the loaded library, its errors."""
