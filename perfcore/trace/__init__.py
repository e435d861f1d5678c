"""Real traces in."""
