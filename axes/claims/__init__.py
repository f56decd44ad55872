"""The literature's claimed equivalences, each a declared object with a check that runs against this package."""
