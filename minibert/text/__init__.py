"""Text to tokens and back, without losing a character."""
