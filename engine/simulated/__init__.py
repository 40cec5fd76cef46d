"""An engine that computes nothing: for testing schedulers strictly, and for measuring everything else."""

from engine.simulated.engine import SimulatedEngine
from engine.simulated.options import SimulatedOptions

__all__ = ["SimulatedEngine", "SimulatedOptions"]
