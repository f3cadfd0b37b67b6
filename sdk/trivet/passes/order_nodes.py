"""Chooses an order of nodes with a low peak of live bytes; several ways are tried, the best is taken."""

from __future__ import annotations

from trivet.ir.graph import Module
from trivet.pipeline import Context


def order_nodes(module: Module, ctx: Context) -> None:
    """Reorders the nodes of every graph."""
