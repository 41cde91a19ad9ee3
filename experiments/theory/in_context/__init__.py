"""In-context regression with and without the first layer's value."""
