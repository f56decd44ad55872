"""What other libraries' users meet: our models in transformers, our operators behind fla's names."""
