"""A communicator, from the ground up."""
