from collections.abc import Callable
from typing import Any

environment_variables: dict[str, Callable[[], Any]]
