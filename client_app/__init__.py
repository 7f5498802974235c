"""The client: its data, its private model, and what it does with one message."""
