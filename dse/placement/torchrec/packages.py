"""TorchRec is optional: what to say when it is not there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from perfcore.errors import MissingPackageError

# TorchRec asks for the CUDA build of FBGEMM; `--no-deps` takes the one for CPUs in its place.
INSTALL = (
    "pip install 'dlrm-dse[torchrec]' && pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 "
    "(with torch 2.13.0; where there is a GPU, fbgemm-gpu in place of fbgemm-gpu-cpu)"
)


def require() -> None:
    """Import TorchRec.

    Raises:
        MissingPackageError: it, or a package that it needs, is not installed or does not fit.
    """
    try:
        with quiet():
            import torchrec.distributed.planner  # noqa: F401
    except (ImportError, OSError, AttributeError) as err:
        raise MissingPackageError(
            f"This needs TorchRec, but it cannot be imported: {err}.", hint=INSTALL
        ) from err


@contextmanager
def quiet() -> Iterator[None]:
    """TorchRec's warnings about itself, and its log below errors, left out."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
