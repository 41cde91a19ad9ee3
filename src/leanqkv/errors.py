"""The errors a person causes and can mend: shown as one line, exit code 2, never a traceback."""


class LeanError(Exception):
    """What is wrong, what was found, what to do; one line."""
