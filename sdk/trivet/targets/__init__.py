"""Delegates at export time."""

from trivet.targets.base import Bytes, Compiled, Memory, Piece, Target, Targets, Work, find, register_target

__all__ = ["Bytes", "Compiled", "Memory", "Piece", "Target", "Targets", "Work", "find", "register_target"]
