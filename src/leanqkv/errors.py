"""The errors a person causes and can mend: shown as one line, exit code 2, never a traceback."""


class LeanError(Exception):
    """What is wrong, what was found, what to do; one line."""


def first_line(error: Exception) -> str:
    """Return the first line of another library's message, to quote it in one of ours; its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
