"""Forms in which tensors travel."""
