"""`leanqkv presets`."""


def presets() -> None:
    """List the base sizes and the mechanisms, each with its source."""
    from .listing import list_presets

    list_presets()
