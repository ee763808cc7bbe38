from typing import NamedTuple

from torch import Tensor

class StandardCombineInput(NamedTuple):
    hidden_states: Tensor
