"""Ways to validate beside one run here: unseen designs, another machine, a correction from what was measured."""
