"""Designs and modules as ops and kernels."""
