"""One file a paper: its mathematics as free functions on tensors."""
