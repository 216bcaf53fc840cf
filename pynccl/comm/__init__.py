"""Communicators: creation, collectives, point-to-point, memory, plans, and shutdown."""
