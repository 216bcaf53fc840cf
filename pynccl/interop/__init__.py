"""What users hand over: buffers, streams, devices."""
