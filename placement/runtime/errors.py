"""What the runtime raises. Each is also the built-in error that a caller would expect."""

from __future__ import annotations


class SizeError(ValueError):
    """A size that an axis does not divide, or that contradicts what the program was built for."""


class MeshError(ValueError):
    """A mesh that is not the one the program was emitted for."""


class StateError(RuntimeError):
    """Parameters or gradients that are missing, misnamed, misshapen or not final."""


class RankError(RuntimeError):
    """Simulated ranks that do not reach the same collective."""
