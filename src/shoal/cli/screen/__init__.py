"""A run on a whole screen: `render` in `layout` makes of a `SwarmStatus` lines of a width, at most so many. Pure."""
