"""Op knowledge as data: a rule per op, from which strategies are generated.

Importing this package registers the project's own rules through the same ``rule`` that users call.
"""

from placement.rules import attention, indexing, loss, pointwise, products, reductions, spatial, spectra, views
from placement.rules.core import Collective, Form, Implementation, Rule, Way, lookup, rule, signature_of
from placement.rules.strategies import Context, JointStrategy, Strategy, joint_strategy, runs_as, strategies

__all__ = [
    "Collective",
    "Context",
    "Form",
    "Implementation",
    "JointStrategy",
    "Rule",
    "Strategy",
    "Way",
    "attention",
    "indexing",
    "joint_strategy",
    "lookup",
    "loss",
    "pointwise",
    "products",
    "reductions",
    "rule",
    "runs_as",
    "signature_of",
    "spatial",
    "spectra",
    "strategies",
    "views",
]
