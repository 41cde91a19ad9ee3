"""An MLP with a skip that learns another one in a changed basis."""
