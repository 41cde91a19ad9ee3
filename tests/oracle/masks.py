"""Which keys a query sees."""

from typing import Any


def window_holds(config: Any, layer: int) -> bool:
    """A sliding window holds in `window_layers`, or every layer; with YOCO's `local`, only before the middle one."""
    if config.window_layers is not None and layer not in config.window_layers:
        return False
    return not config.key_value.get("local", False) or layer < config.num_hidden_layers // 2 - 1


def visible(config: Any, layer: int, query: int, key: int, prefix: list[int] | None) -> bool:
    """Causal: key <= query. Prefix: or the key is in the prefix. Bidirectional: always. A sliding window of w: and
    query - key < w."""
    if config.sliding_window is not None and window_holds(config, layer) and query - key >= config.sliding_window:
        return False
    if config.mask_type == "bidirectional" or key <= query:
        return True
    return config.mask_type == "prefix" and prefix is not None and bool(prefix[key])


def seen(config: Any, layer: int, positions: int, prefix: list[int] | None) -> list[list[int]]:
    """The visible keys of every query."""
    return [
        [key for key in range(positions) if visible(config, layer, query, key, prefix)] for query in range(positions)
    ]
