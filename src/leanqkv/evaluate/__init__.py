"""Evaluation: loss on text, of one model or of two compared; on images; accuracy on images and downstream tasks."""
