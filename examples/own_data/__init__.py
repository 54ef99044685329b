"""An example of a data set of one's own; see README.md beside this file."""
