"""Delegates at export time."""

from trivet.targets.base import Memory, Target, Targets, find

__all__ = ["Memory", "Target", "Targets", "find"]
