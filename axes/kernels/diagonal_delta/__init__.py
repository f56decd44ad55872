"""One state with a gate for every key entry and a rank-one factor: the delta rule, DPLR."""
