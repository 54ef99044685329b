"""Inner optimizers and learning rates, pseudo-gradients, the outer optimizer and the flat form of a stage's state.

Empty on purpose: `optim.schedule` is used by processes that never import torch.
"""
