"""The transformer: configuration, plan, mechanisms, model. One flat folder that travels with every checkpoint."""
