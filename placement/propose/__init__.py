"""What the tool writes and proposes by itself: a first spec for a model, and mends of a spec that cannot be met.

Nothing here knows parameters or ops by name. Candidates come from the factors of the graph, and whether one is any
good is for the solver to say: what is proposed has been planned and priced.
"""

from placement.propose.mend import mended
from placement.propose.scaffold import Scaffold, scaffold

__all__ = ["Scaffold", "mended", "scaffold"]
