"""What `python -m pynccl` runs."""
