"""Placement problems in the abstract: bounds, branch and bound, local search."""
