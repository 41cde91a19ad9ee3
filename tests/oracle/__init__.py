"""The model as its equations, slowly: float64, loops over layers, heads and positions, basic operations only.

Row vectors throughout: `x W`; a linear layer named `w` stores its matrix transposed, as `w.weight` [outputs, inputs].
"""
