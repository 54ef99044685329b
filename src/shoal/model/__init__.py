"""Model families and their stages. Empty on purpose: `model.seeding` is used by processes that never import torch."""
