"""The activation functions that `hidden_act` can name, under the names `transformers` uses."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Activation(nn.Module):
    """A parameter-free activation, as a module so that it has a place in the module tree."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name  # the name and not the function, so that models can be pickled

    def forward(self, x: Tensor) -> Tensor:
        return _FUNCTIONS[self.name](x)

    def extra_repr(self) -> str:
        return self.name


class XIELU(nn.Module):
    """xIELU with trainable curvature on both sides (https://arxiv.org/abs/2411.13010, section 3).

    Its two parameters and two constants are part of a checkpoint, as in `transformers`.
    """

    alpha_p: Tensor
    alpha_n: Tensor
    beta: Tensor
    eps: Tensor

    draws_itself = True  # its initial values are not those of BERT's layers

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))
        self.register_buffer("beta", torch.empty(()))
        self.register_buffer("eps", torch.empty(()))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The published start: both curvatures 0.8, slope 0.5 at zero."""
        self.alpha_p.fill_(math.log(math.expm1(0.8)))
        self.alpha_n.fill_(math.log(math.expm1(0.8 - 0.5)))
        self.beta.fill_(0.5)
        self.eps.fill_(-1e-6)

    def forward(self, x: Tensor) -> Tensor:
        positive = F.softplus(self.alpha_p) * x * x
        negative = (torch.expm1(torch.minimum(x, self.eps)) - x) * (self.beta + F.softplus(self.alpha_n))
        return torch.where(x > 0, positive + self.beta * x, negative + self.beta * x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _laplace(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2))))


def _identity(x: Tensor) -> Tensor:
    return x


# GELU is the erf form unless the name says otherwise (https://arxiv.org/abs/1606.08415); the five tanh
# names are five spellings of one formula and differ only in rounding.
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_10": lambda x: F.gelu(x).clamp(-10, 10),
    "gelu_accurate": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_python": F.gelu,
    "gelu_python_tanh": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "hardswish": F.hardswish,
    "laplace": _laplace,
    "leaky_relu": F.leaky_relu,
    "linear": _identity,
    "mish": F.mish,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
    "swish": F.silu,
    "tanh": torch.tanh,
}


def activation(name: str) -> nn.Module:
    """The activation called `name`, one of `config.ACTIVATION_NAMES`; "prelu" and "xielu" have parameters."""
    if name == "prelu":
        return nn.PReLU()
    if name == "xielu":
        return XIELU()
    return Activation(name)
