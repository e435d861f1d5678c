"""The inner solver: where each embedding table lives."""
