"""Starts a delegate of one's own: a folder with a driver, a Target, their build and tests, from templates/delegate."""

from __future__ import annotations

import keyword
import os
import re
from pathlib import Path

from trivet.error import Error
from trivet.targets.base import known

TEMPLATES = Path(__file__).resolve().parent / "templates" / "delegate"


def new_delegate(name: str, folder: str | os.PathLike[str] | None = None) -> list[Path]:
    """Writes the project.

    Args:
        name: of the delegate, its driver, its Python module.
        folder: where, made when missing; must be empty. None: ./NAME.

    Returns:
        The files written.

    Raises:
        Error: a name that is none, or taken; a folder that is not empty.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise Error(f"a delegate's name must be of lower case letters, digits and _, got {name!r}")
    if name in known() or name in ("null", "trivet", "test"):
        raise Error(f"{name!r} is taken", remedy="choose another name")
    to = Path(name if folder is None else folder)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise Error(f"{to} is there already", remedy="give another folder: --to DIR")
    to.mkdir(parents=True, exist_ok=True)
    written = []
    for template in sorted(TEMPLATES.glob("*.in")):
        path = to / template.name.removesuffix(".in").replace("package", name)
        path.write_text(template.read_text().replace("@name@", name))
        written.append(path)
    return written
