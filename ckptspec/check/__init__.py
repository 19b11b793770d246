"""Pure rules: documents in, findings out."""
