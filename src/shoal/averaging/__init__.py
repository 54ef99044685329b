"""The outer round: what a replica averages, and the drivers that connect the round's machines to network and device."""
