"""A change of basis through a norm."""
