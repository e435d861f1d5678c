"""A design's plan by its predicted iteration time, with a lower bound over all plans."""
