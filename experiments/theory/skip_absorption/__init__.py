"""ReLU MLPs that can do without their skip connection."""
