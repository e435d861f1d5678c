"""Runs designs and kernels for real; imports torch, numpy and the standard library only."""
