"""Values of a config.json, read with their types; errors name the key."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, overload

from worker_svc.models.spec import UnsupportedModel


@dataclass(frozen=True, slots=True)
class ConfigJson:
    """The part of a config.json that describes the decoder."""

    architecture: str  # that of the family, or one that holds the family's decoder
    values: Mapping[str, Any]
    ignored_keys: Collection[str] = ()  # read as if they were not there

    def get(self, name: str) -> Any:
        """The value as it is; None: absent, or null."""
        return self.values.get(name)

    def required(self, name: str) -> Any:
        """A value that must be there. Raises UnsupportedModel."""
        if (value := self.get(name)) is None:
            raise UnsupportedModel(f"config.json: {name} is missing")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """A switch. Raises UnsupportedModel for a value of another kind."""
        if (value := self.get(name)) is None:
            return default
        if not isinstance(value, bool):
            raise UnsupportedModel(f"config.json: {name} is {value!r}, neither true nor false")
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        """A positive integer. Raises UnsupportedModel for another value, or none."""
        if default is not None and self.get(name) is None:
            return default
        value = self.required(name)
        if not isinstance(value, int) or value < 1:
            raise UnsupportedModel(f"config.json: {name} is {value!r}, not a positive integer")
        return value

    def count(self, name: str, default: int = 0) -> int:
        """An integer from 0 on. Raises UnsupportedModel for another value."""
        if (value := self.get(name)) is None:
            return default
        if type(value) is not int or value < 0:
            raise UnsupportedModel(f"{name}: {value!r} is no number from 0 on")
        return value

    @overload
    def above_zero(self, name: str, default: float) -> float: ...

    @overload
    def above_zero(self, name: str, default: None = None) -> float | None: ...

    def above_zero(self, name: str, default: float | None = None) -> float | None:
        """A number above 0; `default` where there is none. Raises UnsupportedModel."""
        if (value := self.get(name)) is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise UnsupportedModel(f"{name}: {value!r} is no number above 0")
        return float(value)

    def heads(self) -> tuple[int, int, int]:
        """Numbers of query heads and of KV heads, and the size of each. Raises UnsupportedModel."""
        num_heads = self.positive("num_attention_heads")
        num_kv_heads = self.positive("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModel(
                f"num_key_value_heads: {num_kv_heads} does not divide {num_heads} attention heads"
            )
        return num_heads, num_kv_heads, self._head_dim(num_heads)

    def _head_dim(self, num_heads: int) -> int:
        hidden_size = self.positive("hidden_size")
        if self.get("head_dim") is None and hidden_size % num_heads:
            raise UnsupportedModel(
                f"hidden_size: {hidden_size} is no multiple of {num_heads} heads; "
                "head_dim is absent"
            )
        head_dim = self.positive("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise UnsupportedModel(f"head_dim: {head_dim} is odd, and rotation pairs dimensions")
        return head_dim

    def window(self, absent: int | None = None) -> int | None:
        """The size of `sliding_window` in tokens; `absent` where the key is not there.

        Raises UnsupportedModel for a value that is no size.
        """
        window = self.values.get("sliding_window", absent)
        if window is None:
            return None
        if not isinstance(window, int | float) or window < 1:
            raise UnsupportedModel(
                f"config.json: sliding_window is {window!r}, not a positive integer"
            )
        return int(window)
