"""Tasks: the data that models are trained on and the measures they are judged by."""
