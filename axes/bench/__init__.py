"""Side by side: what the package's implementations cost beside the best peers, on the machine at hand.

A row is shown only after its numbers were checked against float64; figures come with the floor that the bytes and
products of the task allow, as a table, as JSON and as a picture.
"""
