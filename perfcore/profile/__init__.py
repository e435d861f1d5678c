"""Calibrations and where they came from."""
