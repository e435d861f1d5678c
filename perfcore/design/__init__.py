"""Frozen values that say what is predicted."""
