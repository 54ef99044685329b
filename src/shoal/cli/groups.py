"""What commands are for: under these titles `shoal --help` lists them, in this order."""

from __future__ import annotations

from cyclopts import Group

_TITLES = "Train", "See how a run is", "Steer a run", "Use a model", "Check and measure", "Set up"

TRAIN, WATCH, STEER, MODEL, CHECK, SET_UP = (Group(title, sort_key=place) for place, title in enumerate(_TITLES))
