"""The control plane: signed records in hivemind's DHT, and the view of the swarm that is built from them."""
