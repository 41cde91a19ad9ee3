"""Golden outputs: the results of every command on tiny models, its refusals and its help, and the import graph."""
