"""What every update owes its reader: the common suite of checks and random tuples to run it on."""
