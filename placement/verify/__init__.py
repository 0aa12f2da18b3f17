"""The parity check: n ranks against one device."""

from placement.verify.main import verify
from placement.verify.parity import Failure, Parity, Worst
from placement.verify.processes import ProcessFailure

__all__ = ["Failure", "Parity", "ProcessFailure", "Worst", "verify"]
