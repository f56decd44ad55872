"""How a tuple is stepped on parameters: groups, routing, states, and the ways of stepping many at once."""
