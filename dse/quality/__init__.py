"""Accuracy proxies: how good a design's model may become, and how little is known about it."""
