"""Kernels as durations."""
