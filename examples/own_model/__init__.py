"""An example of a model family of one's own; see README.md beside this file."""
