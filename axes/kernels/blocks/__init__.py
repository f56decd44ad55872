"""What surrounds a recurrence: from the products of the tokens to its signal, and from what it read to the output."""
