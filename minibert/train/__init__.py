"""Labelled data, metrics and (later) training."""
