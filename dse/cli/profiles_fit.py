"""`dse profiles fit`: a folder of samples, measured here or elsewhere, becomes a profile."""

from __future__ import annotations

from pathlib import Path


def fit(samples: str | None, out: Path | None) -> None:
    """Fit `samples`, write the profile to `out`, print its errors.

    Raises:
        DseError: one of the two is missing.
        ProfileError: the samples do not make a profile.
    """
    from dse.cli.calibrate import print_fitted
    from dse.errors import DseError
    from perfcore.profile.fit_samples import fit_profile

    if samples is None or out is None:
        raise DseError(
            "`dse profiles fit` needs a folder of samples and where the profile goes.",
            hint="dse profiles fit samples/ -o my-profile",
        )
    print_fitted(fit_profile(Path(samples), out))
