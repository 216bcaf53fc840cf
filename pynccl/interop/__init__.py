"""Adapters for user objects: buffers, streams, devices."""
