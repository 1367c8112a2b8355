"""The scheduler: which request extends by how many tokens in each step, and in which slots.

``Scheduler`` (``scheduler.py``) is what others use; ``SchedulerConfig`` (``config.py``) is what it can be told. Read on
along one step:

- **State.** ``request.py`` one sequence (its ``buffer.py``, ``stop.py``, ``healing.py``); ``roster.py`` which requests
  wait, prefill, decode; ``memory.py`` who owns which slot of the pool and of the tree.
- **Taking requests.** ``intake.py`` what is refused at once.
- **Plan.** ``planner.py`` who extends, and the bound on a step; ``retract.py`` who gives way. ``prefill.py`` how prompts
  share what is left; ``lineup.py`` in which order waiting requests are tried, by a ``policy.py`` and by age. Does one
  more fit? ``room.py`` asks, with ``occupancy.py`` and ``admission.py`` for the future peak and ``recent.py`` for the
  sequences that programs are about to go on with. The result is a ``plan.py``.
- **Compute.** ``compute.py`` forward, score and sample; ``masks.py`` what constraints allow, filled meanwhile;
  ``draft.py`` tokens that are tried on speculation; ``flight.py`` a step that is computed while the next is planned.
- **Commit.** ``commit.py`` enters the results; ``advance.py`` what one new token does to its request; ``conclude.py`` the
  last look at a constrained text; ``emit.py`` the message that goes up.
- **Looking in.** ``counters.py``, ``stats.py``; ``cache_view.py`` the tree as people may see it.
"""

from trellis.runtime.scheduler.config import SchedulerConfig
from trellis.runtime.scheduler.policy import POLICIES, Policy, QueueView
from trellis.runtime.scheduler.scheduler import Scheduler

__all__ = ["POLICIES", "Policy", "QueueView", "Scheduler", "SchedulerConfig"]
