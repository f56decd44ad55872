"""One state with a gate for every key entry."""
