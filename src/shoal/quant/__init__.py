"""Fake quantisation of a stage's module (learned step size): `apply.apply_quant` is the only thing others call."""
