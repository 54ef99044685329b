"""The control plane: signed records in hivemind's DHT, and the view of the swarm that is built from them."""

from shoal.control.deferred_package import defer_package

# Before any module here imports a part of it.
defer_package("hivemind")
