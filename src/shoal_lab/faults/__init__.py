"""Faults to order: at a message in a swarm of one process (`messages`), or on a link between two real endpoints.

parse_link("20mbit,150ms")     link_grammar    text of a flag -> Link
Link, LinkConditions           link            what a link is like, each direction for itself
LinkModel                      link_model      which bytes arrive when, and which wrong: seeded, without I/O
LinkProxy                      link_proxy      stands between a dialler and a listener and does what the model says
"""
