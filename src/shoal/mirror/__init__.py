"""The role that holds the newest state of every stage, for servers that come when nobody else does."""
