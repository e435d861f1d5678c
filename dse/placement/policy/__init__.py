"""Placements of a design by a named policy, as a space asks for them by the hundred."""
