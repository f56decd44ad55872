"""What users ask of an optimizer beside stepping: reports, diagnostics, checkpoints of torch.optim."""
