"""A method known on one axis, tried on another: what paired runs say."""
