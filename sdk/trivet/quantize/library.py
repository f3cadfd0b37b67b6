"""torchao, which does the quantising of torch graphs, as an optional dependency."""

from __future__ import annotations

import logging
import warnings
from contextlib import redirect_stderr
from functools import cache
from types import ModuleType

from trivet.error import Error


@cache
def torchao() -> ModuleType:
    """The package torchao, imported on first use.

    Raises:
        Error: it is not installed, or does not go with this torch.
    """
    import io

    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it lists libraries for other machines that it could not load
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            import torchao.quantization
            import torchao.quantization.pt2e.quantize_pt2e
            import torchao.quantization.pt2e.quantizer
    except ImportError as e:
        raise Error(f"quantising needs the package torchao: {e}", remedy="pip install 'torchao>=0.18'") from None
    finally:
        logging.disable(level)
    return torchao  # type: ignore[no-any-return]
