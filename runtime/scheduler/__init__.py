"""The scheduler: which request extends by how many tokens in each step, and in which slots."""

from trellis.runtime.scheduler.config import SchedulerConfig
from trellis.runtime.scheduler.policy import POLICIES, Policy, QueueView
from trellis.runtime.scheduler.scheduler import Scheduler

__all__ = ["POLICIES", "Policy", "QueueView", "Scheduler", "SchedulerConfig"]
