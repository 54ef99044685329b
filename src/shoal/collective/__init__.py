"""Collective operations over a group of peers at one epoch: the plan, and the ring that carries it out."""
