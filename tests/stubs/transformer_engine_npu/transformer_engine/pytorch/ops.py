"""Fusible operations: Megatron-core names two in annotations."""

import torch


class FusibleOperation(torch.nn.Module): ...


class Sequential(torch.nn.Module): ...
