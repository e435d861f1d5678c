"""The outer search: exact enumeration of small spaces, Optuna with bulk refinement of large ones."""
