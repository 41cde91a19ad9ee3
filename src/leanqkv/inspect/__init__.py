"""What `leanqkv inspect` shows."""
