"""Loaded once by the process that the jobs are forked from."""

import torch
import torch._decomp
import torch.export
import torch.fx.experimental.symbolic_shapes

import trivet.api  # noqa: F401
