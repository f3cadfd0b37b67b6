"""The one exception that trivet raises on purpose."""

from __future__ import annotations


class Error(Exception):
    """Something that the user can act on.

    Attributes:
        reason: what is wrong, with what was expected and what came.
        node: where: module path and source line of the user's model, a file, an argument; "" when it does not apply.
        remedy: what to do about it.
    """

    def __init__(self, reason: str, *, node: str = "", remedy: str = "") -> None:
        self.reason, self.node, self.remedy = reason, node, remedy
        super().__init__(reason)

    def __str__(self) -> str:
        where = f"{self.node}: " if self.node else ""
        todo = f"\n  to do: {self.remedy}" if self.remedy else ""
        return f"{where}{self.reason}{todo}"
